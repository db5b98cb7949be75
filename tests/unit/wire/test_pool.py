"""Memory that is lent must be nobody else's meanwhile, and serve again afterwards."""

import threading

import numpy as np
import pytest
import torch

from poseidon.wire.pool import SMALLEST_BYTES, Pool

MB = 1 << 20


def place(view: memoryview) -> int:
    """Return where the memory lies."""
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


def test_memory_serves_again_when_nobody_refers_to_it():
    pool = Pool()
    view = pool.lend(MB)
    first = place(view)
    assert view.nbytes == MB
    assert pool.spare_bytes == 0
    del view
    assert pool.spare_bytes == MB
    again = pool.lend(MB)
    assert place(again) == first
    assert pool.spare_bytes == 0


@pytest.mark.parametrize(
    "derive",
    [
        lambda view: view,
        lambda view: view[5:9],
        lambda view: view.cast("f"),
        lambda view: np.frombuffer(view, np.float32),
        lambda view: np.frombuffer(view, np.float32)[3:7],
        lambda view: np.asarray(view)[::2].reshape(2, -1),
        lambda view: torch.frombuffer(view, dtype=torch.float32)[1:],
        lambda view: torch.from_numpy(np.frombuffer(view, np.float32).view(np.int32)),
    ],
)
def test_anything_made_from_it_keeps_it(derive):
    pool = Pool()
    kept = derive(pool.lend(MB))
    assert pool.spare_bytes == 0
    del kept
    assert pool.spare_bytes == MB


def test_like_sizes_share_blocks():
    pool = Pool()
    first = place(pool.lend(MB - 5))
    view = pool.lend(MB - 100_000)
    assert place(view) == first
    assert view.nbytes == MB - 100_000


def test_blocks_are_little_larger_than_what_they_serve():
    pool = Pool()
    for size in (SMALLEST_BYTES, SMALLEST_BYTES + 1, 1_700_000, 2 * MB, 2 * MB + 1, 64 * MB):
        before = pool.spare_bytes
        pool.lend(size)
        assert size <= pool.spare_bytes - before < 1.25 * size + 1


def test_no_more_is_kept_than_allowed():
    pool = Pool(most_spare_bytes=3 * MB)
    views = [pool.lend(MB) for _ in range(5)]
    assert len({place(view) for view in views}) == 5
    views.clear()
    assert pool.spare_bytes == 3 * MB


def test_small_pieces_are_left_to_the_allocator():
    pool = Pool()
    assert pool.lend(0).nbytes == 0
    assert pool.lend(SMALLEST_BYTES - 1).nbytes == SMALLEST_BYTES - 1
    assert pool.spare_bytes == 0


def test_threads_never_share_memory():
    pool = Pool()
    mixed: list[int] = []

    def use(mark: int) -> None:
        held = []
        for turn in range(200):
            values = np.frombuffer(pool.lend(SMALLEST_BYTES + 1000 * (turn % 7)), np.uint8)
            values[:] = mark
            held.append(values)
            if turn % 3 == 2:
                mixed.extend(turn for values in held if not (values == mark).all())
                held.clear()

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mixed
