"""Lets the workers agree on their shares of a batch: measures this one's own work, tells it, and hears the others'.

Every few batches the workers exchange what they have measured, over a control channel of their own, and each computes
the same new shares (``shares.py``). Nobody waits for that: the numbers leave at a step's end and are read some batches
later. Loaders fetch ahead, one worker's more than another's, so each also tells which batches it has dealt already: new
shares hold from a batch on that nobody has dealt.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from poseidon.data.shares import NO_BOUND, Balance, BatchShares, PaceMeter, Report
from poseidon.errors import ConfigError, MismatchError
from poseidon.job import tell
from poseidon.team.epochs import live_on
from poseidon.team.team import Team
from poseidon.team.watch import keep_clock

EVERY = 5
"""Batches between two agreements."""
AHEAD = 2
"""Batches that a worker may deal after it has told its numbers and before it needs the others'."""
MOST_IN_VAIN = 3
"""Agreements without any measurement after which the user is told."""
MEMORY = 0.9
"""Part of a device's memory that a growing share may fill."""
_PICO = 1e12


class Balancer:
    """The shares of one sampler's batches. The place of a batch is its number since these workers met."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._pace_s = 0.0
        """This worker's, known from before where workers have changed."""
        self._largest = 0
        """The largest share that this worker has had."""
        self._lock = threading.RLock()
        self._team: Team | None = None
        self._has_warned = False
        self._in_vain = 0
        """How often there was nothing to tell."""
        self._closing: weakref.finalize[..., Balancer] | None = None
        self._reset()
        live_on(self)

    def _reset(self) -> None:
        self._balance: Balance | None = None
        self._plans: list[tuple[int, BatchShares]] = []
        """From which batch on they hold."""
        self._laps = PaceMeter()
        self._is_first = True
        """Whether this is the first batch of a pass."""
        self._since = 0.0, 0.0, 0
        """When the batch under way began, how long this worker had waited for others by then, and how many backwards
        had exchanged gradients."""
        self._pending: tuple[int, Callable[[str], list[list[int]]]] | None = None
        """From which batch on the outcome of an agreement under way is needed, and how to get it."""
        self._dealt = 0
        self.handed = 0
        """Batches that these workers were handed together."""

    def begin(self, total: int, largest: int) -> None:
        """Meet the other workers, unless that is done. Collective.

        Batches have ``total`` samples as a rule, and ``largest`` at most.
        """
        if self._balance is None:
            size = dist.get_world_size() if dist.is_initialized() else 1
            if size > 1:
                self._team = Team(None)
                self._closing = weakref.finalize(self, self._team.close)
                self._closing.atexit = False  # a team closes itself then
            words = [*self._report(self._pace_s), total, largest]
            rows = [words] if self._team is None else self._team.gather_ints(words, "the speeds of all workers")
            if {tuple(row[-2:]) for row in rows} != {(total, largest)}:
                raise MismatchError(f"the workers have different batches, of {[row[-2] for row in rows]} samples")
            check_bounds(largest, [row[1] for row in rows])
            self._balance = Balance(total, [_read(row) for row in rows])
            self._follow(0, self._balance.dealing)
        self._is_first = True
        self._restart_lap()

    def _restart_lap(self) -> None:
        clock = keep_clock()
        if torch.cuda.is_initialized():
            clock.settle = _settle_device
            clock.settle()
        self._since = time.monotonic(), sum(clock.waited_s), clock.steps

    def shares(self, number: int, total: int) -> tuple[int, ...]:
        """Return all workers' shares of a batch; may wait for the others' numbers. Any thread."""
        with self._lock:
            if self._pending is not None and number >= self._pending[0]:
                self._settle()
            self._dealt = max(self._dealt, number + 1)
            return self._dealing_of(number).divide(total)

    def _dealing_of(self, number: int) -> BatchShares:
        return next(dealing for first, dealing in reversed(self._plans) if first <= number)

    def end_lap(self, samples: int, is_usual: bool, is_weighted: bool) -> None:
        """Note that this worker has used a batch, and tell the others if that is due. Collective now and then.

        ``is_weighted``: the program has asked for the weight of its share.
        """
        began, waited, steps = self._since
        self._restart_lap()
        if self._since[2] > steps and not is_weighted:
            self._warn_of_weights()
        if self._team is None:
            return
        # The first batch of a pass takes as long as its loader needs to start.
        self._laps.add(samples, self._since[0] - began - (self._since[1] - waited), is_usual and not self._is_first)
        self._is_first = False
        self._largest = max(self._largest, samples)
        if len(self._laps) >= EVERY:
            with self._lock:
                self._tell(self._team)

    def _warn_of_weights(self) -> None:
        shares = self._dealing_of(self.handed - 1).shares
        if max(shares) - min(shares) > 1:
            self._warn(
                f"the shares of the batch are {', '.join(map(str, shares))}, but the program does not use "
                "sampler.weight; unless its loss is weighted by samples in another way, multiply the mean loss by "
                "sampler.weight, or samples of small shares count more than others"
            )

    def _warn(self, text: str) -> None:
        if self._team is not None and self._team.rank == 0 and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"balance: {text}", stacklevel=6)

    def _tell(self, team: Team) -> None:
        if self._pending is not None:
            self._settle()
        assert self._balance is not None
        pace_s = self._laps.take()
        if not self._since[2]:  # waits in exchanges that are not Poseidon's cannot be told from work
            pace_s, self._in_vain = 0.0, self._in_vain + 1
            if self._in_vain == MOST_IN_VAIN:
                self._warn(
                    "shares stay as they are, since Poseidon has exchanged no gradients so far and cannot tell work "
                    "from waits; use poseidon.DistributedDataParallel or poseidon.distribute"
                )
        words = [*self._report(pace_s), self.handed, self._dealt, digest(self._balance.shares)]
        self._pending = self._dealt + AHEAD, team.start_gather(words)

    def _settle(self) -> None:
        """Take the outcome of the agreement under way."""
        assert self._team is not None
        assert self._pending is not None
        assert self._balance is not None
        rows = self._pending[1]("the speeds of all workers")
        self._pending = None
        handed, dealt, digests = zip(*(row[-3:] for row in rows), strict=True)
        odd = [rank for rank in range(len(rows)) if (handed[rank], digests[rank]) != (handed[0], digests[0])]
        if odd:
            raise MismatchError(
                f"the workers do not divide the same batches: rank 0 has used {handed[0]}, and rank {odd[0]} "
                f"{handed[odd[0]]}, or their shares differ; iterate over the sampler alike on all workers"
            )
        if self._balance.hear([_read(row) for row in rows]):
            self._follow(max(dealt) + AHEAD, self._balance.dealing)
        self._pace_s = self._balance.paces_s[self._team.rank]

    def _follow(self, number: int, dealing: BatchShares) -> None:
        """Divide batches from this one on anew."""
        # What was handed out last must still be known, for its weight.
        older = [place for place, (first, _) in enumerate(self._plans) if first < self.handed]
        self._plans = [*self._plans[max(older, default=0) :], (number, dealing)]
        tell.tell(shares=dealing.shares)

    def _report(self, pace_s: float) -> list[int]:
        return [round(pace_s * _PICO), NO_BOUND if self._most is None else self._most, self._room()]

    def _room(self) -> int:
        if not (torch.cuda.is_initialized() and self._largest):
            return NO_BOUND
        free, _ = torch.cuda.mem_get_info()
        return memory_bound(self._largest, torch.cuda.max_memory_allocated(), free + torch.cuda.memory_reserved())

    # From one epoch of an elastic job to the next.

    def leave_epoch(self, error: BaseException) -> None:
        """Forget the other workers; this one's speed is kept."""
        team, self._team = self._team, None
        self._reset()
        if self._closing is not None:
            self._closing.detach()
        if team is not None:
            team.drop(error)

    def enter_epoch(self) -> None:
        """Nothing: the next :meth:`begin` meets the others."""

    def verify_replicas(self) -> None:
        """Nothing: all workers compute the shares from the same numbers."""


def check_bounds(largest: int, most: Sequence[int]) -> None:
    """Refuse batches that the workers cannot hold."""
    if largest > sum(most):
        raise ConfigError(
            f"a batch of {largest} samples, but the workers hold at most {' + '.join(map(str, most))} (--balance-max): "
            "raise the bounds, make the batch smaller, or add workers"
        )


def memory_bound(share: int, peak_bytes: int, room_bytes: int) -> int:
    """Return the largest share that is sure to fit, if ``share`` took ``peak_bytes`` at most; never less than that one.

    All memory counts as that of samples, although the model's does not grow with them: the bound is on the safe side.
    """
    return max(share, int(share * MEMORY * room_bytes / max(1, peak_bytes)))


def _read(row: Sequence[int]) -> Report:
    return Report(row[0] / _PICO, row[1], row[2])


def _settle_device() -> None:
    torch.cuda.current_stream().synchronize()


def digest(shares: Sequence[int]) -> int:
    """Return a number that tells shares apart."""
    return zlib.crc32(",".join(map(str, shares)).encode())
