"""Waits inside C++ code that nothing can interrupt: they end with the epoch that they belong to."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest

from poseidon.errors import WireError, WorkerLostError
from poseidon.job import attempts, elastic, world
from poseidon.job.elastic import ElasticJob, Seat
from poseidon.wire import door
from poseidon.wire.handshake import Credentials
from poseidon.wire.secret import JobSecret

SEAT = Seat(epoch=0, rank=1, size=2, local_rank=1, local_size=2, address="127.0.0.1", port=1)


class Launcher:
    """What a launcher says to a worker, and that worker's end of it."""

    def __init__(self) -> None:
        pipe, self._outlet = os.pipe()
        self.job = ElasticJob(pipe, "127.0.0.1", 2, is_late=False)

    def say(self, **news: Any) -> None:
        os.write(self._outlet, json.dumps(news).encode() + b"\n")

    def end_epoch(self, epoch: int = 0) -> None:
        self.say(over=epoch, is_soft=False)

    def close(self) -> None:
        os.close(self._outlet)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the variables of a seat be as before afterwards."""
    for name in SEAT.variables:
        monkeypatch.setenv(name, "")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """A launcher that has dealt this worker a seat."""
    with contextlib.closing(Launcher()) as one, ThreadPoolExecutor(1) as threads:
        sitting = threads.submit(one.job.arrive)
        # Said again and again: it is heard only by one that waits.
        while not sitting.done():
            one.say(seat=asdict(SEAT))
            with contextlib.suppress(TimeoutError):
                sitting.exception(0.01)
        monkeypatch.setattr(attempts, "this_job", lambda: one.job)
        monkeypatch.setattr(attempts, "CUT_OFF_S", 0.0)
        yield one


def test_the_first_seat_is_taken_even_if_its_epoch_is_over() -> None:
    """In a later epoch others may be further in the program; they meet this worker in ``Checkpoint.run``."""
    with contextlib.closing(Launcher()) as one, ThreadPoolExecutor(1) as threads:
        sitting = threads.submit(one.job.arrive)
        while not sitting.done():
            with one.job._changed:  # it cannot sit down before it has heard both
                one.job._hear({"seat": asdict(SEAT)})
                one.job._hear({"over": 0, "is_soft": False})
            with contextlib.suppress(TimeoutError):
                sitting.exception(0.01)
        assert sitting.result() == SEAT
        assert one.job.is_over


def test_one_that_has_left_is_apart_until_it_sits_down_again(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(elastic.tell, "tell", lambda elastic: told.append(elastic["apart"]))
    launcher.job._beat()
    launcher.job.leave()
    launcher.job._beat()
    assert (told[0], told[-1]) == (0, 1)


def test_a_call_passes_on_what_it_returns_and_raises(launcher: Launcher) -> None:
    assert attempts.within_epoch(lambda: 3, "a number") == 3
    with pytest.raises(ZeroDivisionError):
        attempts.within_epoch(lambda: 1 // 0, "a number")


def test_outside_of_elastic_jobs_a_call_stays_on_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "this_job", lambda: None)
    assert attempts.within_epoch(threading.current_thread, "a thread") is threading.current_thread()


def test_a_call_that_nothing_can_interrupt_ends_with_the_epoch_and_goes_no_further(launcher: Launcher) -> None:
    """As gloo's wait for a connection that a lost worker would have opened."""
    gate, has_gone_on, threads = threading.Lock(), [], []
    gate.acquire()

    def wait() -> None:
        threads.append(threading.current_thread())
        launcher.end_epoch()
        gate.acquire()  # in C, without a limit
        has_gone_on.append(True)

    with pytest.raises(WorkerLostError, match="gave up waiting for the other workers to join: the epoch is over"):
        attempts.within_epoch(wait, "the other workers to join")
    gate.release()
    threads[0].join()
    assert not has_gone_on


class LateLock:
    """A lock that an attempt's thread gets only after it was left behind."""

    def __init__(self) -> None:
        self._was_left = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread().name == "poseidon-attempt":
            self._was_left.wait()

    def __exit__(self, *_: object) -> None:
        self._was_left.set()


def test_a_call_that_has_ended_when_it_is_left_behind_says_nothing(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: list[object] = []
    monkeypatch.setattr(threading, "excepthook", complaints.append)
    attempt = attempts.Attempt(launcher.end_epoch)
    attempt._lock = LateLock()  # type: ignore[assignment]
    with pytest.raises(WorkerLostError, match="the epoch is over"):
        attempt.end_with(launcher.job, "nobody")
    attempt._thread.join()
    assert not complaints


def test_a_call_in_an_epoch_that_is_over_already_ends_at_once(launcher: Launcher) -> None:
    launcher.job.leave()
    gate = threading.Lock()
    gate.acquire()
    with pytest.raises(WorkerLostError, match="the epoch is over"):
        attempts.within_epoch(gate.acquire, "nobody")
    gate.release()


def test_one_that_leaves_the_epoch_ends_the_waits_of_its_other_threads(launcher: Launcher) -> None:
    gate = threading.Lock()
    gate.acquire()

    def wait() -> None:
        threading.Thread(target=launcher.job.leave).start()
        gate.acquire()

    with pytest.raises(WorkerLostError, match="the epoch is over"):
        attempts.within_epoch(wait, "nobody")
    gate.release()


def test_a_store_whose_worker_is_gone_is_not_waited_for(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's client tries again and again to connect, and has no connection that could be cut."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    real = world._open_store

    def open_store(place: world.World, limit: timedelta) -> Any:
        launcher.end_epoch()
        return real(place, min(limit, timedelta(seconds=30)))

    monkeypatch.setattr(world, "_open_store", open_store)
    monkeypatch.setenv("POSEIDON_RUN", "a-run")
    with pytest.raises(WorkerLostError, match="gave up waiting for the first worker's store"):
        world._make_group(world.World(1, 2, 1, 2, "127.0.0.1", port), "gloo", None)


def test_doors_are_not_tried_again_after_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does not answer, and connections that are cut as soon as they are open, look like a crowd."""
    tries: list[float] = []

    def refuse(_address: object, limit_s: float, _source: object) -> socket.socket:
        tries.append(limit_s)
        raise TimeoutError("timed out")

    credentials = Credentials(JobSecret(b"0" * 32).derive("test"), encrypt=False)
    monkeypatch.setattr(door.socket, "create_connection", refuse)
    monkeypatch.setattr(door, "epoch_is_over", lambda: len(tries) == 3)
    monkeypatch.setattr(door, "RETRY_S", 0.0)
    with pytest.raises(WireError, match="could not connect to rank 0"):
        door.enter(credentials, 1, 0, ("127.0.0.1", 1), "127.0.0.1", 600.0)
    assert tries == [door.TRY_S] * 3
