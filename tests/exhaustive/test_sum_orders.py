"""All orders in which two or three workers can start sums and receive messages, with both arithmetics."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from compact_codec import same_bits
from poseidon.wire.memory import MemoryNetwork
from sum_team import CHUNK_VALUES, draw, make_one_slot

Array = np.ndarray[Any, Any]
Choose = Callable[[int], int]


def in_rank_order(values: list[Array]) -> Array:
    return functools.reduce(np.add, values)


def explore(run: Callable[[Choose], None]) -> int:
    """Call ``run`` once for every sequence of answers that its ``choose`` can give; return how often."""
    path: list[tuple[int, int]] = []
    for runs in itertools.count(1):
        steps = itertools.count()

        def choose(count: int, steps: Any = steps) -> int:
            at = next(steps)
            if at == len(path):
                path.append((0, count))
            return path[at][0]

        run(choose)
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return runs
        path[-1] = (path[-1][0] + 1, path[-1][1])
    raise AssertionError


def deliver(network: MemoryNetwork, index: int) -> None:
    network._scheduler = lambda _: index
    network.step()


@pytest.mark.parametrize(
    ("kind", "workers", "chunks", "clocks", "orders"),
    [
        ("host", 2, 2, 2, 540),
        ("host", 2, 1, 3, 48),
        ("host", 3, 1, 2, 8400),
        ("device", 2, 2, 1, 18),
        ("device", 2, 1, 3, 48),
        ("device", 3, 1, 1, 60),
    ],
)
def test_every_order_of_starts_and_arrivals_gives_the_same_bits(
    kind: str, workers: int, chunks: int, clocks: int, orders: int
) -> None:
    size = chunks * CHUNK_VALUES
    values = [[draw([rank, clock], size) for rank in range(workers)] for clock in range(clocks)]
    totals = [in_rank_order(ones) for ones in values]
    assert workers == 2 or not same_bits(totals[0], in_rank_order(values[0][::-1]))

    def run(choose: Choose) -> None:
        team, slot, network = make_one_slot(kind, workers, chunks)
        started = [0] * workers
        futures: list[Future[Any] | None] = [None] * workers
        mine: list[Array] = [values[0][0]] * workers
        while True:
            ready = [
                rank
                for rank in range(workers)
                if started[rank] < clocks and ((future := futures[rank]) is None or future.done())
            ]
            events = len(ready) + len(network.parcels)
            if not events:
                break
            choice = choose(events)
            if choice >= len(ready):
                deliver(network, choice - len(ready))
            else:
                rank = ready[choice]
                clock = started[rank]
                mine[rank] = values[clock][rank].copy()
                futures[rank] = team[rank].start(mine[rank], slot, clock)
                started[rank] += 1
            for rank, future in enumerate(futures):
                if future is not None and future.done():
                    future.result()
                    assert same_bits(mine[rank], totals[started[rank] - 1])
        assert started == [clocks] * workers
        assert all(future is not None and future.done() for future in futures)

    assert explore(run) == orders
