import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from poseidon.errors import WorkerLostError
from poseidon.team import watch
from poseidon.team.membership import Member, Membership
from poseidon.team.watch import Watch
from poseidon.wire.mesh import MeshError

TEAM = Membership(0, tuple(Member(rank, host, host) for rank, host in enumerate(["ape", "bee", "cat"])))
Beat = dict[str, Any]


class Store:
    """A job's store in which the other workers' heartbeats follow a script: one entry per reading."""

    def __init__(self, script: dict[int, list[Beat | None]]) -> None:
        self.values: dict[str, str] = {}
        self.is_gone = False
        self.has_beaten = threading.Event()
        self._script = script

    def set(self, key: str, value: str) -> None:
        self.values[key] = value
        self.has_beaten.set()

    def check(self, keys: list[str]) -> bool:
        if self.is_gone:
            raise ConnectionError("connection refused\nand more of no interest")
        for key in keys:
            rank = int(key.rsplit("/", 1)[1])
            beat = self._script[rank].pop(0) if self._script.get(rank) else None
            if beat is not None:
                self.values[key] = json.dumps(beat)
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


def beats(count: int, step: int, doing: str) -> list[Beat | None]:
    return [{"beat": number, "step": step, "doing": doing} for number in range(count)]


Open = Callable[..., tuple[Watch, Store]]


@pytest.fixture
def open_watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr(watch, "BEAT_S", 0.002)
    opened: list[Watch] = []

    def make(script: dict[int, list[Beat | None]] | None = None, **options: Any) -> tuple[Watch, Store]:
        store = Store(script or {})
        opened.append(Watch(store, "job", 0, TEAM, **{"timeout_s": 60.0, **options}))
        return opened[-1], store

    yield make
    for one in opened:
        one.close()
        assert not any(thread.is_alive() for thread in one._threads)


def text_of(one: Watch, peer: int | None = None) -> str:
    error = one.lost("fc1", peer, TimeoutError("no answer\nsecond line"))
    assert isinstance(error, WorkerLostError)
    return str(error)


def test_the_heartbeat_says_what_this_worker_does(open_watch: Open) -> None:
    one, store = open_watch()
    for step, doing in ((0, "starting"), (7, "in backward")):
        one.note(step, doing)
        _await_beats(store, 2)
        beat = json.loads(store.values["job/0"])
        assert (beat["step"], beat["doing"]) == (step, doing)


def _await_beats(store: Store, count: int) -> None:
    for _ in range(count):
        store.has_beaten.clear()
        assert store.has_beaten.wait(30)


def test_the_heartbeat_counts_up_and_ends_with_close(open_watch: Open) -> None:
    one, store = open_watch()
    _await_beats(store, 1)
    first = json.loads(store.values["job/0"])["beat"]
    _await_beats(store, 1)
    assert json.loads(store.values["job/0"])["beat"] > first
    one.close()
    last = store.values["job/0"]
    one.close()
    assert store.values["job/0"] == last


def test_a_dead_worker_is_named_with_its_last_words(open_watch: Open) -> None:
    one, _ = open_watch({1: beats(1, 41, "in forward"), 2: beats(9, 42, "in backward")})
    one.note(42, "in backward")
    text = text_of(one, peer=2)
    assert text.startswith("rank 0 (ape) gave up waiting at step 42 for fc1 from rank 2 (cat): ")
    assert "rank 1 (bee) is dead or cut off; last seen at step 41, in forward" in text
    assert text.endswith("The wait ended with: TimeoutError: no answer")
    assert "rank 2 (cat) is" not in text


def test_a_worker_that_never_arrived_is_named(open_watch: Open) -> None:
    one, _ = open_watch({1: beats(9, 0, "starting")})
    assert "rank 2 (cat) never reported" in text_of(one)


def test_all_dead_workers_are_named(open_watch: Open) -> None:
    one, _ = open_watch({2: beats(1, 3, "finished backward")})
    text = text_of(one)
    assert "rank 1 (bee) never reported; rank 2 (cat) is dead or cut off" in text


def test_the_worker_furthest_behind_is_named_if_all_are_alive(open_watch: Open) -> None:
    one, _ = open_watch({1: beats(9, 6, "at the end of backward"), 2: beats(9, 6, "in forward")}, timeout_s=12.5)
    one.note(6, "at the end of backward")
    text = text_of(one)
    assert "nobody is dead" in text
    assert "rank 2 (cat) is alive, at step 6, in forward" in text
    assert "rank 1" not in text
    assert "12.5 s; timeout_s=" in text


def test_an_earlier_step_is_further_behind_than_any_phase(open_watch: Open) -> None:
    one, _ = open_watch({1: beats(9, 5, "finished backward"), 2: beats(9, 6, "starting")})
    text = text_of(one)
    assert "rank 1 (bee) is alive, at step 5" in text
    assert "rank 2" not in text


def test_the_slowest_is_named_even_if_it_moves(open_watch: Open) -> None:
    moving = [{"beat": number, "step": number, "doing": "in forward"} for number in range(9)]
    one, _ = open_watch({1: list(moving), 2: beats(9, 30, "at the end of backward")})
    text = text_of(one)
    assert "rank 1 (bee) is alive" in text
    assert "rank 2" not in text


def test_whoever_sent_a_damaged_message_is_named_whoever_is_dead(open_watch: Open) -> None:
    watcher, _ = open_watch({1: beats(1, 3, "in backward"), 2: beats(5, 4, "in forward")})
    error = watcher.lost("the roll call", 2, MeshError(2, "message 7 is damaged", is_damaged=True))
    assert "rank 2 (cat) sent a damaged message. The wait ended with: MeshError" in str(error)
    assert "rank 1" not in str(error)


def test_a_silent_store_points_at_rank_0(open_watch: Open) -> None:
    one, store = open_watch()
    store.is_gone = True
    text = text_of(one)
    assert (
        "the job's store does not answer, so rank 0 (ape) is probably gone (ConnectionError: connection refused)"
        in text
    )
    assert "no interest" not in text


def test_an_error_without_words_is_named_by_its_class(open_watch: Open) -> None:
    one, _ = open_watch({1: beats(9, 0, "starting"), 2: beats(9, 0, "starting")})
    assert str(one.lost("fc1", None, KeyboardInterrupt())).endswith("The wait ended with: KeyboardInterrupt")


class Work:
    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done
        self.is_asked = threading.Event()

    def is_completed(self) -> bool:
        self.is_asked.set()
        return self.is_done


class Ending:
    """Stands for the end of the process: keeps the error."""

    def __init__(self) -> None:
        self.errors: list[WorkerLostError] = []
        self.has_come = threading.Event()

    def __call__(self, error: WorkerLostError) -> None:
        self.errors.append(error)
        self.has_come.set()


ALIVE = {1: beats(99, 3, "in backward"), 2: beats(99, 3, "in backward")}


def test_a_guarded_operation_that_never_ends_ends_the_process(open_watch: Open) -> None:
    ending = Ending()
    one, _ = open_watch({rank: list(script) for rank, script in ALIVE.items()}, timeout_s=0.0, give_up=ending)
    one.note(3, "in backward")
    one.guard(Work(is_done=True), "conv1")
    one.guard(Work(is_done=True), "conv2")
    one.guard(Work(is_done=False), "fc6 ... fc8")
    assert ending.has_come.wait(30)
    one.close()
    (error,) = ending.errors
    assert "at step 3 for fc6 ... fc8: nobody is dead" in str(error)
    assert "TimeoutError: not done after 0 s" in str(error)


def test_guarded_operations_have_their_time(open_watch: Open) -> None:
    ending = Ending()
    one, _ = open_watch(timeout_s=3600.0, give_up=ending)
    works = [Work(is_done=False), Work(is_done=True)]
    for number, work in enumerate(works):
        one.guard(work, f"bucket {number}")
    assert works[0].is_asked.wait(30)
    works[0].is_done = True
    # Operations end in the order in which they were started, so the second is looked at once the first is done.
    assert works[1].is_asked.wait(30)
    one.close()
    assert not ending.errors


def test_without_a_callback_the_process_says_why_and_ends(
    open_watch: Open, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []
    has_ended = threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        has_ended.set()

    monkeypatch.setattr("poseidon.team.watch.os._exit", end)
    one, _ = open_watch({1: beats(99, 3, "in backward")}, timeout_s=0.0)
    one.guard(Work(is_done=False), "fc8")
    assert has_ended.wait(30)
    one.close()
    assert statuses == [watch.EXIT_STATUS] == [75]
    assert (
        "poseidon: rank 0 (ape) gave up waiting at step 0 for fc8: rank 2 (cat) never reported"
        in capsys.readouterr().err
    )


def test_a_closed_watch_is_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT_S", 0.002)
    one = Watch(Store({}), "job", 0, TEAM, timeout_s=60.0)
    is_there = weakref.ref(one)
    one.close()
    one.close()
    del one
    gc.collect()
    assert is_there() is None
