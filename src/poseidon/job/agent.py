"""The store of torchrun's agent, in which restarted workers must not find what dead ones have written.

torchrun's agents keep one store while they start the workers anew. As of torch 2.13, workers look there for each other
under the same names after a restart as before. They find addresses of processes that are gone, and every restart fails.
Here the workers of one start agree on a name of their own first.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from poseidon.errors import WorkerLostError

_PAUSE_S = 0.01


class Store(Protocol):
    """What is needed of torch's stores."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Wait for a key and read it."""

    def check(self, keys: list[str]) -> bool:
        """Return whether keys have been written."""


def has_agent(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether an agent of torchrun serves the store."""
    env = os.environ if environ is None else environ
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_agent_store(host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the part of the agent's store that only the workers of this start use. Collective."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, port, size, False, timeout)
    return PrefixStore(f"poseidon/{agree_on_name(store, rank, size, timeout.total_seconds())}", store)


def agree_on_name(store: Store, rank: int, size: int, limit_s: float) -> str:
    """Return a name that the workers of this start have in common, and no earlier ones. Collective.

    Each says who it is. The first answers whoever has spoken last for a rank, dead or not, until one has confirmed: the
    confirmation names both, so it cannot be an earlier one's.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"poseidon/here/{rank}", mine)
        first = store.get(f"poseidon/name/{mine}").decode()
        store.set(f"poseidon/heard/{mine}/{first}", "")
        return first
    deadline = time.monotonic() + limit_s
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if store.check([f"poseidon/here/{other}"]):
                his = store.get(f"poseidon/here/{other}").decode()
                store.set(f"poseidon/name/{his}", mine)
                if store.check([f"poseidon/heard/{his}/{mine}"]):
                    missing.remove(other)
        if time.monotonic() > deadline:
            raise WorkerLostError(f"rank 0: ranks {sorted(missing)} did not come to torchrun's store in {limit_s:g} s")
        if missing:
            time.sleep(_PAUSE_S)
    return mine
