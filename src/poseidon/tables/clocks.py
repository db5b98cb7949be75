"""How far workers may drift apart: one clock per worker, and a bound. Pure.

A worker's clock is the number of steps it has finished. At clock ``c`` it may read only when every other worker has
finished at least ``c - staleness`` steps: the rows then hold all updates of those steps, and the reader is never more
than ``staleness`` clocks ahead of the slowest worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from poseidon.errors import ConfigError, ServerError, unknown_name
from poseidon.planning.numbers import count_from

KINDS = ("bsp", "ssp", "asp")


@dataclass(frozen=True)
class Consistency:
    """What a read may miss: nothing (``bsp``), the last ``staleness`` clocks (``ssp``), or anything (``asp``)."""

    kind: str = "bsp"
    staleness: int = 0
    """Clocks that a worker may be ahead of the slowest; for ``ssp`` only."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("consistency", self.kind, KINDS)
        clocks = count_from(0, self.staleness)
        if clocks is None:
            raise ConfigError(f"staleness is {self.staleness!r}; it counts clocks: expected a whole number from 0 on")
        object.__setattr__(self, "staleness", clocks)
        if self.kind != "ssp" and self.staleness:
            raise ConfigError(
                f"staleness is {self.staleness} with consistency {self.kind!r}, which has no adjustable bound; "
                "use consistency='ssp'"
            )

    @property
    def bound(self) -> int | None:
        """Clocks that a worker may be ahead; None without a bound."""
        return {"bsp": 0, "ssp": self.staleness, "asp": None}[self.kind]

    @property
    def survives_loss(self) -> bool:
        """Whether the others continue without a worker that died."""
        return self.kind != "bsp"


class Clocks:
    """The clocks of all workers, as known to one place. Not thread-safe: the caller holds a lock."""

    def __init__(self, workers: Iterable[int], bound: int | None) -> None:
        self._clocks = dict.fromkeys(workers, 0)
        self._gone: set[int] = set()
        self.bound = bound
        self.losses: dict[int, int] = {}
        """The last clocks of workers that died."""
        if not self._clocks:
            raise ConfigError("clocks need at least one worker")
        if bound is not None and bound < 0:
            raise ConfigError(f"the bound is {bound} clocks; it cannot be negative")

    @property
    def present(self) -> list[int]:
        """Workers that have neither left nor died."""
        return [worker for worker in self._clocks if worker not in self._gone]

    @property
    def slowest(self) -> int:
        """The smallest clock of the workers present; with none present, the largest of all."""
        clocks = [self._clocks[worker] for worker in self.present]
        return min(clocks) if clocks else max(self._clocks.values())

    def clock_of(self, worker: int) -> int:
        """Return the number of steps that ``worker`` has finished."""
        self._check_known(worker)
        return self._clocks[worker]

    def tick(self, worker: int) -> bool:
        """Note that ``worker`` finished a step; return whether the slowest clock advanced."""
        return self.advance(worker, self.clock_of(worker) + 1)

    def advance(self, worker: int, clock: int) -> bool:
        """Like :meth:`tick`, for a worker that reports its clock; refuse a gap or repetition."""
        self.check_present(worker)
        if clock != self._clocks[worker] + 1:
            raise ServerError(
                f"worker {worker} reports clock {clock} after clock {self._clocks[worker]}; "
                f"expected {self._clocks[worker] + 1}: a message was lost or sent twice"
            )
        before = self.slowest
        self._clocks[worker] = clock
        return self.slowest > before

    def start_at(self, worker: int, clock: int) -> None:
        """Set the clock of a worker that another place counted before."""
        self._check_known(worker)
        self._clocks[worker] = clock

    def may_read(self, worker: int, clock: int | None = None) -> bool:
        """Return whether ``worker`` may read at ``clock`` (default: its own)."""
        at = self.clock_of(worker) if clock is None else clock
        return self.bound is None or self.slowest >= at - self.bound

    def awaited_by(self, clock: int) -> list[int]:
        """Return the workers that a read at ``clock`` waits for."""
        if self.bound is None:
            return []
        return [worker for worker in self.present if self._clocks[worker] < clock - self.bound]

    def leave(self, worker: int) -> bool:
        """Note that ``worker`` is done and blocks no other; return whether the slowest clock advanced."""
        self._check_known(worker)
        before = self.slowest
        self._gone.add(worker)
        return self.slowest > before

    def lose(self, worker: int) -> bool:
        """Note that ``worker`` died: it is recorded in :attr:`losses` and blocks no other any more.

        Returns whether the slowest clock advanced. A worker that is already gone is not lost again.
        """
        self._check_known(worker)
        if worker in self._gone:
            return False
        self.losses[worker] = self._clocks[worker]
        return self.leave(worker)

    def check_present(self, worker: int) -> None:
        """Refuse a worker that is unknown, has left or was given up."""
        self._check_known(worker)
        if worker in self._gone:
            how = "was given up as dead" if worker in self.losses else "left"
            raise ServerError(f"worker {worker} {how} at clock {self._clocks[worker]} and cannot go on")

    def _check_known(self, worker: int) -> None:
        if worker not in self._clocks:
            raise ServerError(f"worker {worker} is unknown; the clocks are of workers {list(self._clocks)}")
