"""Poseidon: train on a few ordinary machines, close to linear speed, with the same result.

Public names are loaded when first used, so that the pure parts (planner, simulator, command line) work and
start quickly without PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from poseidon.version import __version__ as __version__

__all__ = ["Checkpoint", "DistributedDataParallel", "Plan", "data", "distribute", "init", "plan", "ps"]

_HOME = {
    "Checkpoint": "poseidon.checkpoints.checkpoint",
    "DistributedDataParallel": "poseidon.api",
    "Plan": "poseidon.planning.planner",
    "distribute": "poseidon.distributing",
    "init": "poseidon.api",
    "plan": "poseidon.api",
}

if TYPE_CHECKING:
    from poseidon import data, ps
    from poseidon.api import DistributedDataParallel, init, plan
    from poseidon.checkpoints.checkpoint import Checkpoint
    from poseidon.distributing import distribute
    from poseidon.planning.planner import Plan


def __getattr__(name: str) -> Any:
    if name in ("data", "ps"):
        return importlib.import_module(f"poseidon.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'poseidon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
