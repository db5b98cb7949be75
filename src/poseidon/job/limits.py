"""How long anything waits for another worker: one limit, from which all others follow."""

from __future__ import annotations

from poseidon.errors import ConfigError
from poseidon.job.settings import TIMEOUT

IDLE_TIMES = 6
"""So many limits for what heartbeats cannot judge: workers that neither compute nor read nor write and yet are in no
exchange (they may wait for a slow disk or another machine), and torch's own collectives."""


def time_limit(given: float | None = None, what: str = "timeout_s") -> float:
    """Return the limit in seconds: the ``given`` one, else ``POSEIDON_TIMEOUT``. One that cannot work is refused."""
    limit_s, what = (TIMEOUT.read(), TIMEOUT.name) if given is None else (given, what)
    if not limit_s > 0:
        raise ConfigError(f"{what} is {limit_s:g}; it must be positive")
    return limit_s


def torch_limit(limit_s: float) -> float:
    """Return the time limit of torch's process groups, which know nothing of heartbeats."""
    return IDLE_TIMES * limit_s


def reach_limit(limit_s: float) -> float:
    """Return how long a machine may take to answer at all, to a connection or on one."""
    return max(limit_s / 10, 10.0)
