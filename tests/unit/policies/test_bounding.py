"""The choice of a staleness: when times are published and read, and that all workers choose alike."""

import itertools
import random

import numpy as np

from poseidon.engine.bounding import AGAIN, WINDOW, ChosenBound
from poseidon.tables.tables import TableSpec

WORKERS = 3


class SharedRows:
    """Rows that all workers see; each worker's own clock and limit."""

    def __init__(self, rows):
        self.spec = TableSpec("t", len(rows), rows.shape[1], consistency="ssp", staleness=16)
        self.now = 0
        self.limits = []
        self.reads = []
        self._rows = rows

    def limit(self, staleness):
        self.limits.append(staleness)

    def inc(self, rows, deltas):
        self._rows[rows] += deltas

    def get(self, rows):
        self.reads.append(self.now)
        return self._rows[rows].copy()


def train(steps, own_s, waited_s=0.001, loads=()):
    """Let all workers take steps in turn, with two clocks before those in ``loads``; return tables and bounds."""
    rows = np.zeros((WORKERS, 2 * WINDOW), np.float32)
    tables = [SharedRows(rows) for _ in range(WORKERS)]
    bounds = [ChosenBound(table, np.arange(WORKERS), worker) for worker, table in enumerate(tables)]
    for step in range(steps):
        for table in tables:
            table.now += 2 * (step in loads)
        for worker, bound in enumerate(bounds):
            bound.measured(own_s(worker, step), waited_s)
        for table, bound in zip(tables, bounds, strict=True):
            table.now += 1
            bound.clocked()
    return tables, bounds


def stalling(worker, step):
    return 0.1 * (1 + 3 * (random.Random(f"{worker} {step}").random() < 0.25))


def test_workers_start_in_lockstep_and_choose_alike_after_a_window():
    tables, bounds = train(WINDOW - 1, stalling)
    assert [table.limits for table in tables] == [[0]] * WORKERS
    tables, bounds = train(WINDOW, stalling)
    assert len({bound.bound for bound in bounds}) == 1
    assert bounds[0].bound > 0
    assert tables[0].limits == [0, bounds[0].bound]


def test_clocks_of_loads_are_no_steps():
    tables, bounds = train(WINDOW, stalling, loads=[0, 7])
    assert tables[0].reads == [WINDOW + 4]
    assert bounds[0].bound > 0
    # Over the clock at which to choose: at the next one.
    tables, bounds = train(AGAIN + 20, stalling, loads=[AGAIN + tables[0].limits[1] - 1])
    assert len(tables[0].reads) == 2
    assert len({bound.bound for bound in bounds}) == 1


def test_choices_come_again_at_a_clock_that_all_others_have_passed_by_then():
    tables, _ = train(2 * AGAIN + 20, stalling)
    first = tables[0].limits[1]
    assert tables[0].reads[0] == WINDOW
    assert tables[0].reads[1] == AGAIN + first


def test_equal_workers_stay_in_lockstep():
    _, bounds = train(AGAIN + 1, lambda *_: 0.1)
    assert [bound.bound for bound in bounds] == [0] * WORKERS
    assert bounds[0].prospects[0].bound == 0


def test_a_change_of_stragglers_is_followed_one_place_at_a_time():
    tables, _ = train(5 * AGAIN, lambda worker, step: stalling(worker, step) if step < AGAIN // 2 else 0.1)
    limits = tables[0].limits[1:]
    assert limits[-1] == 0
    assert all(after in (before - 1, before - 2) for before, after in itertools.pairwise(limits))


def test_times_too_short_or_too_long_to_publish_do_no_harm():
    _, bounds = train(WINDOW, lambda worker, _: 0.0 if worker else 1e9)
    assert bounds[0].prospects
