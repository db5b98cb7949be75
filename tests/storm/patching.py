"""Puts the stand-ins in the place of the modules that Poseidon's rooms have imported.

Poseidon writes ``import threading`` and ``threading.Lock()``, so it is enough to replace the name in each of its
modules: the code under test does not change, and pays nothing when it is not simulated.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import os
import pkgutil
import queue
import secrets
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

from poseidon.job import closing
from poseidon.team import pulse, team, watch
from poseidon.wire import sending
from storm import network, primitives
from storm.world import here

_STAND_INS: list[tuple[Any, Any]] = [
    (threading, primitives.threading),
    (queue, primitives.queue),
    (time, primitives.time),
    (secrets, primitives.secrets),
    (socket, network.socket),
    (select, network.select),
    (concurrent.futures.Future, primitives.Future),
    (closing.at_exit, primitives.at_exit),
    (team._default_store, lambda: here().store),
    (pulse.moved_bytes, lambda: 0),
    (sending.unacknowledged, lambda connection: connection.out.held),
    (team.machine_name, lambda: here().running.process.name),
]
ROOMS = ("wire", "team", "sums", "tables", "routes", "engine", "ps")
"""The rooms whose code runs in the simulation."""


@functools.cache
def import_rooms() -> None:
    """Import every module of these rooms: one that is imported later would not be simulated."""
    for room in ROOMS:
        module = importlib.import_module(f"poseidon.{room}")
        for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
            # What needs a package that is not installed cannot be what a simulated worker uses.
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"poseidon.{room}.{found.name}")


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Let the code of these rooms use the stand-ins."""
    import_rooms()
    by_identity = {id(real): stand_in for real, stand_in in _STAND_INS}
    replaced = []
    for name, module in list(sys.modules.items()):
        if name.startswith(tuple(f"poseidon.{room}" for room in ROOMS)):
            for attribute, value in list(vars(module).items()):
                if id(value) in by_identity:
                    replaced.append((module, attribute, value))
                    setattr(module, attribute, by_identity[id(value)])
    try:
        # Workers that were killed in an earlier world have closed nothing. And a simulated machine has no interfaces.
        with (
            mock.patch.object(watch, "_OPEN", weakref.WeakSet()),
            mock.patch.object(watch, "_noted", []),
            mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": ""}),
        ):
            yield
    finally:
        for module, attribute, value in replaced:
            setattr(module, attribute, value)
