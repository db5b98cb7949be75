"""Batches made by several threads: in order, bounded, and gone when nobody wants them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.io.batches import BatchBuffers
from poseidon.caffe.io.draws import Draws
from poseidon.caffe.io.prefetch import Prefetcher, thread_count
from poseidon.errors import ConfigError


class Counted:
    """A batch of three parts, each of which may wait or fail."""

    def __init__(self, number, begin=None, fails=()):
        self.number = number
        self.begin = begin
        self.fails = fails
        self.done = []

    def parts(self):
        for part in range(3):
            if ("read", part) in self.fails:
                raise ConfigError(f"batch {self.number} read {part}")
            yield lambda part=part: self.do(part)

    def do(self, part):
        if self.begin is not None:
            self.begin(self.number, part)
        if ("do", part) in self.fails:
            raise ConfigError(f"batch {self.number} part {part}")
        self.done.append(part)

    def finish(self):
        assert sorted(self.done) == [0, 1, 2]
        if "finish" in self.fails:
            raise ConfigError(f"batch {self.number} finish")
        return self.number


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_batches_come_in_order_and_end(threads):
    ahead = Prefetcher((Counted(number) for number in range(50)), 3, "test", threads)
    assert [next(ahead) for _ in range(50)] == list(range(50))
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)


def test_a_slow_part_keeps_later_batches_waiting_not_out_of_order():
    release = threading.Event()
    later = threading.Semaphore(0)

    def begin(number, part):
        if (number, part) == (0, 1):
            assert release.wait(30)
        elif number:
            later.release()

    ahead = Prefetcher((Counted(number, begin) for number in range(4)), 2, "test", 2)
    got = []
    caller = threading.Thread(target=lambda: got.append(next(ahead)))
    caller.start()
    for _ in range(3):  # the other thread makes the next batch meanwhile
        assert later.acquire(timeout=30)
    assert not got
    release.set()
    caller.join(30)
    assert [*got, next(ahead), next(ahead), next(ahead)] == [0, 1, 2, 3]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_batches_are_begun_than_fit(threads):
    begun = threading.Semaphore(0)

    def assemblies():
        for number in range(100):
            begun.release()
            yield Counted(number)

    ahead = Prefetcher(assemblies(), 2, "test", threads)
    assert next(ahead) == 0
    for _ in range(3):  # one taken, two ahead
        assert begun.acquire(timeout=30)
    assert not begun.acquire(timeout=0.05)
    assert [next(ahead) for _ in range(99)] == list(range(1, 100))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ([("do", 1), ("do", 2)], "batch 2 part 1"),
        ([("read", 1)], "batch 2 read 1"),
        ([("do", 0), ("read", 2)], "batch 2 part 0"),
        (["finish"], "batch 2 finish"),
    ],
)
def test_the_first_failure_comes_after_the_batches_before_it(threads, fails, message):
    ahead = Prefetcher((Counted(number, fails=fails if number == 2 else ()) for number in range(9)), 4, "t", threads)
    assert [next(ahead), next(ahead)] == [0, 1]
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            next(ahead)


def test_a_source_that_fails_is_named():
    def assemblies():
        yield Counted(0)
        raise ConfigError("no more")

    ahead = Prefetcher(assemblies(), 4, "test", 2)
    assert next(ahead) == 0
    with pytest.raises(ConfigError, match="no more"):
        next(ahead)


def test_the_interpreter_ends_while_threads_decode():
    """A thread inside OpenCV at that time would abort the process."""
    script = Path(__file__).parent / "endless_decoding.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "leaving\n")


def test_a_forked_process_is_told_that_nobody_reads_for_it(monkeypatch):
    ahead = Prefetcher((Counted(number) for number in range(9)), 1, "test", 1)
    assert next(ahead) == 0
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(ConfigError, match="forked from; build another here"):
        next(ahead)


def test_threads_are_counted_by_the_environment(monkeypatch):
    monkeypatch.setenv("POSEIDON_INPUT_THREADS", "5")
    assert thread_count() == 5
    monkeypatch.setenv("POSEIDON_INPUT_THREADS", "0")
    with pytest.raises(ConfigError, match=r"POSEIDON_INPUT_THREADS is '0', expected a whole number above 0"):
        thread_count()


def test_buffers_are_used_again_when_nobody_has_them():
    buffers = BatchBuffers()
    first = buffers.take((2, 3))
    place = first.ctypes.data
    row = buffers.take((2, 3))
    assert row.ctypes.data != place
    del first
    assert buffers.take((3, 2)).ctypes.data == place


def test_draws_are_uniform_and_independent():
    """Means and correlations over 40,000 records lie within five standard deviations."""
    draws = [Draws(7, record) for record in range(40_000)]
    columns = np.array([[each.below(30), each.below(30), each.below(2)] for each in draws], float)
    assert [columns.min(axis=0).tolist(), columns.max(axis=0).tolist()] == [[0, 0, 0], [29, 29, 1]]
    normal = (columns - [14.5, 14.5, 0.5]) / [np.sqrt((900 - 1) / 12)] * [1, 1, 0] + (columns - 0.5) * [0, 0, 2]
    assert np.abs(normal.mean(axis=0)).max() < 5 / 200
    for shift in (0, 1, 2):
        products = normal[shift:].T @ normal[: len(normal) - shift] / len(normal)
        assert np.abs(products - np.eye(3) * (shift == 0)).max() < 5 / 200
    assert [Draws(7, 3).below(1000), Draws(7, 3).below(1000)] == [Draws(7, 3).below(1000)] * 2
    assert Draws(8, 3).below(2**40) != Draws(7, 3).below(2**40)
