"""Agreeing on shares: the same for every batch on all workers, however far ahead each one's loader reads."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.data import balancing
from poseidon.data.balancing import Balancer, check_bounds, memory_bound
from poseidon.errors import ConfigError, MismatchError
from poseidon.observe.steps import StepClock

BATCH = 60


class WouldBlockError(Exception):
    """A worker would have to wait for others here."""


class Room:
    """Where pretended teams leave their numbers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounds: dict[int, dict[int, list[int]]] = defaultdict(dict)


class PretendTeam:
    """One worker's view of the room."""

    def __init__(self, room: Room, rank: int) -> None:
        self.rank = rank
        self.size = room.size
        self._room = room
        self._round = 0

    def start_gather(self, values: Sequence[int]) -> Callable[[str], list[list[int]]]:
        number, self._round = self._round, self._round + 1
        self._room.rounds[number][self.rank] = list(values)

        def receive(_what: str) -> list[list[int]]:
            found = self._room.rounds[number]
            if len(found) < self._room.size:
                raise WouldBlockError
            return [found[rank] for rank in range(self._room.size)]

        return receive

    def gather_ints(self, values: Sequence[int], what: str) -> list[list[int]]:
        return self.start_gather(values)(what)

    def close(self) -> None:
        """Nothing is open."""

    def drop(self, _error: BaseException) -> None:
        """Nothing is open."""


class Worker:
    """A worker with a loader that reads ``ahead`` batches."""

    def __init__(self, rank: int, ahead: int, pace_s: float) -> None:
        self.rank = rank
        self.balancer = Balancer(None)
        self.dealt: list[tuple[int, ...]] = []
        self.now_s = 0.0
        self.used = 0
        self.is_weighted = True
        self._ahead = ahead
        self._pace_s = pace_s
        self._has_told = True

    def go_on(self, batches: int) -> bool:
        """Use one batch, and deal those that are due; return whether that went without waiting for others."""
        if not self._has_told:
            share = self.dealt[self.used - 1][self.rank]
            self.now_s += share * self._pace_s
            self.balancer.end_lap(share, is_usual=True, is_weighted=self.is_weighted)
            self._has_told = True
        try:
            while len(self.dealt) < min(batches, self.used + 1 + self._ahead):
                self.dealt.append(self.balancer.shares(len(self.dealt), BATCH))
        except WouldBlockError:
            return False
        self.used += 1
        self.balancer.handed += 1
        self._has_told = False
        return True


def _start(monkeypatch: pytest.MonkeyPatch, workers: Sequence[Worker]) -> Callable[[Worker], None]:
    """Let the workers meet; return how to make one of them the process under way."""
    room, clock, here, steps = Room(len(workers)), SimpleNamespace(), [workers[0]], StepClock(0.0)
    steps.steps = 1
    clock.monotonic = lambda: here[0].now_s
    monkeypatch.setattr(balancing, "keep_clock", lambda: steps)
    monkeypatch.setattr(balancing, "time", clock)
    monkeypatch.setattr(balancing, "Team", lambda _group: PretendTeam(room, here[0].rank))
    monkeypatch.setattr(
        balancing, "dist", SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: len(workers))
    )

    def enter(worker: Worker) -> None:
        here[0] = worker

    for worker in (*workers, *workers):  # the first time all but the last would have to wait
        enter(worker)
        with contextlib.suppress(WouldBlockError):
            worker.balancer.begin(BATCH, BATCH)
    return enter


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1.0, 2.0, 4.0])), min_size=2, max_size=4),
    st.randoms(use_true_random=False),
)
def test_all_workers_divide_every_batch_alike(loaders: list[tuple[int, float]], chance: object) -> None:
    batches = 60
    workers = [Worker(rank, ahead, pace_s) for rank, (ahead, pace_s) in enumerate(loaders)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        enter = _start(monkeypatch, workers)
        waiting = 0
        while any(worker.used < batches for worker in workers):
            # A step needs everybody, so nobody is ahead by more than one.
            least = min(worker.used for worker in workers)
            ready = [worker for worker in workers if worker.used < min(batches, least + 1)]
            worker = chance.choice(ready)  # type: ignore[attr-defined]
            enter(worker)
            waiting = 0 if worker.go_on(batches) else waiting + 1
            assert waiting < 200, "nobody can go on"
    assert len({tuple(worker.dealt) for worker in workers}) == 1
    assert all(sum(shares) == BATCH for shares in workers[0].dealt)
    paces = [pace_s for _, pace_s in loaders]
    best_s = BATCH / sum(1 / pace_s for pace_s in paces)
    assert best_s / max(share * pace_s for share, pace_s in zip(workers[0].dealt[-1], paces, strict=True)) > 0.9


def test_workers_that_go_different_ways_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [Worker(rank, 0, 1.0) for rank in range(2)]
    enter = _start(monkeypatch, workers)
    workers[1].balancer.handed = 1

    def go_on() -> None:
        for worker in workers * 10:
            enter(worker)
            worker.go_on(20)

    with pytest.raises(MismatchError, match="rank 0 has used 5, and rank 1 6, or their shares differ"):
        go_on()


def test_a_worker_that_met_others_before_keeps_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [Worker(0, 0, 1.0), Worker(1, 0, 3.0)]
    enter = _start(monkeypatch, workers)
    for _ in range(30):
        for worker in workers:
            enter(worker)
            worker.go_on(100)
    assert workers[0].dealt[-1] == (45, 15)
    new = Worker(2, 0, 1.0)
    for worker in workers:
        worker.balancer.leave_epoch(ConfigError("others come"))
    _start(monkeypatch, [*workers, new])
    # Who is new counts as the slower of two.
    assert new.balancer.shares(0, BATCH) == workers[0].balancer.shares(0, BATCH) == (36, 12, 12)


def test_waits_are_no_work_and_what_the_device_has_to_do_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, settled = StepClock(0.0), []
    clock.settle = lambda: settled.append(True)
    began = clock.begin_wait("a mean")
    clock.end_wait("a mean", began)
    assert settled == [True]
    worker, _ = workers = [Worker(0, 0, 1.0), Worker(1, 0, 1.0)]
    _start(monkeypatch, workers)(worker)
    monkeypatch.setattr(balancing, "keep_clock", lambda: clock)
    worker.go_on(9)
    clock.waited("a mean", 0.0, 20.0)
    worker.go_on(9)
    assert worker.balancer._laps.take() == pytest.approx((30 * 1.0 - 20.0) / 30)


def test_a_program_that_does_not_weight_unequal_shares_is_told_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    clock, workers = StepClock(0.0), [Worker(0, 0, 1.0), Worker(1, 0, 3.0)]
    enter = _start(monkeypatch, workers)
    clock.steps = 1
    monkeypatch.setattr(balancing, "keep_clock", lambda: clock)
    for number in range(60):
        for worker in workers:
            enter(worker)
            worker.is_weighted = False
            clock.steps += number >= 30  # before, no backward: an evaluation
            worker.go_on(99)
        assert len(recwarn) == (number >= 30)
    assert "balance: the shares of the batch are 45, 15, but the program does not use sampler.weight" in str(
        recwarn[0].message
    )


def test_without_exchanges_of_ours_shares_stay_equal_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    workers = [Worker(0, 0, 1.0), Worker(1, 0, 3.0)]
    enter = _start(monkeypatch, workers)
    monkeypatch.setattr(balancing, "keep_clock", lambda: StepClock(0.0))
    for worker in workers * 40:
        enter(worker)
        worker.go_on(99)
    assert set(workers[0].dealt) == {(30, 30)}
    (warning,) = recwarn
    assert "balance: shares stay as they are, since Poseidon has exchanged no gradients" in str(warning.message)


def test_bounds_that_cannot_hold_a_batch_are_refused() -> None:
    check_bounds(12, [6, 6])
    with pytest.raises(ConfigError, match=r"a batch of 13 samples, but the workers hold at most 6 \+ 6 .*add workers"):
        check_bounds(13, [6, 6])


def test_a_share_may_grow_as_far_as_the_devices_memory() -> None:
    assert memory_bound(10, peak_bytes=4 << 30, room_bytes=20 << 30) == 45
    assert memory_bound(10, peak_bytes=4 << 30, room_bytes=3 << 30) == 10  # it has held them
    assert memory_bound(10, peak_bytes=0, room_bytes=1) >= 10
