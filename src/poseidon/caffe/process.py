"""The process-wide part of pycaffe: log, random seed, this worker's rank among the solvers, timer."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass

import torch

from poseidon.caffe import device
from poseidon.caffe.glog import GlogFormatter
from poseidon.errors import UnsupportedError
from poseidon.job.world import World

_log = logging.getLogger("poseidon.caffe")

_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
"""Python's levels in Caffe's order."""


@dataclass
class _Place:
    """The rank and count a script has set; None means the environment's."""

    rank: int | None = None
    count: int | None = None


_place = _Place()


def init_log(level: int = 0, stderr: bool = True) -> None:
    """Log nets and solvers to stderr, from ``level`` up (0 everything, 1 warnings, 2 errors, 3 fatal)."""
    if stderr and not any(isinstance(handler.formatter, GlogFormatter) for handler in _log.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(GlogFormatter())
        _log.addHandler(handler)
    _log.setLevel(_LEVELS[min(max(level, 0), len(_LEVELS) - 1)])


def log(text: str) -> None:
    """Write a line into the log."""
    _log.info(text, stacklevel=2)


def set_random_seed(seed: int) -> None:
    """Make fillers, dropout and shuffling repeatable."""
    torch.manual_seed(seed)


def solver_count() -> int:
    """Return how many workers train together."""
    return World.from_environment().size if _place.count is None else _place.count


def set_solver_count(count: int) -> None:
    """Set how many workers train together; only scripts that start workers themselves need this."""
    _place.count = count


def solver_rank() -> int:
    """Return this worker's number, from 0."""
    return World.from_environment().rank if _place.rank is None else _place.rank


def set_solver_rank(rank: int) -> None:
    """Set this worker's number; only scripts that start workers themselves need this."""
    _place.rank = rank


def set_multiprocess(is_multiprocess: bool) -> None:
    """Accept pycaffe's call; every worker is its own process here anyway."""
    _log.debug("set_multiprocess(%s) changes nothing", is_multiprocess)


def has_nccl() -> bool:
    """Return False: Poseidon's engine exchanges gradients, not Caffe's NCCL class."""
    return False


class NCCL:
    """Placeholder for pycaffe's exchange between GPUs; scripts check ``has_nccl()`` before they use it."""

    def __init__(self, *_arguments: object) -> None:
        raise UnsupportedError(
            "caffe.NCCL is not supported: start the script on several workers and let the solver exchange gradients"
        )


class Timer:
    """A stopwatch that waits for the GPU: ``start()``, ``stop()``, ``ms``."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._elapsed_s = 0.0

    def start(self) -> None:
        """Start, or restart, the stopwatch."""
        _wait_for_device()
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """Stop; ``ms`` then holds the time since ``start``."""
        _wait_for_device()
        self._elapsed_s = time.perf_counter() - self._begin

    @property
    def ms(self) -> float:
        """Milliseconds between the last start and stop."""
        return self._elapsed_s * 1000


def _wait_for_device() -> None:
    if device.active().type == "cuda":
        torch.cuda.synchronize(device.active())
