"""Tables of a process that nobody launched: everything but the wire."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import poseidon.ps
from poseidon.errors import ConfigError, ServerError
from poseidon.job.closing import Closing
from poseidon.ps import SparseRow, Table, TableJob
from poseidon.tables.node import Node


@pytest.fixture
def job() -> Iterator[TableJob]:
    with poseidon.ps.connect() as job:
        yield job


@pytest.mark.parametrize("consistency", ["bsp", "ssp", "asp"])
@pytest.mark.parametrize("eager", [True, False])
def test_a_lone_worker_reads_what_it_wrote(job: TableJob, consistency: str, eager: bool) -> None:
    table = job.table("t", 5, 3, consistency=consistency, eager=eager)
    for clock in range(3):
        assert table.get(2).tolist() == [clock] * 3
        table.inc(2, np.ones(3))
        assert table.get([2, 0, 2]).tolist() == [[clock + 1] * 3, [0] * 3, [clock + 1] * 3]
        assert table.clock() == clock + 1 == table.now
    assert set(table.staleness_seen) == {0}
    assert job.losses == {}


def test_repeated_rows_add_up_and_what_was_read_is_the_readers(job: TableJob) -> None:
    table = job.table("t", 4, 2, "int64")
    table.inc([3, 1, 3], [[1, 1], [2, 2], [10, 10]])
    read = table.get(range(4))
    assert read.tolist() == [[0, 0], [2, 2], [0, 0], [11, 11]]
    read += 5
    assert table.get(3).tolist() == [11, 11]


def test_an_array_may_change_after_inc(job: TableJob) -> None:
    table = job.table("t", 4, 2)
    delta = np.ones((4, 2), np.float32)
    table.inc(range(4), delta)
    delta += 7
    table.clock()
    assert table.get(0).tolist() == [1, 1]


def test_sparse_rows(job: TableJob) -> None:
    table = Table("t", 10**6, 10**9, "float64", sparse=True)
    table.inc(7, [1.0, 2.0, 4.0], columns=[10**8, 3, 3])
    table.inc([9, 7], [SparseRow(np.array([0]), np.array([1.5])), SparseRow(np.array([3]), np.array([1.0]))])
    table.clock()
    first, second, third = table.get([7, 8, 9])
    assert (first.columns.tolist(), first.values.tolist()) == ([3, 10**8], [7.0, 1.0])
    assert len(second.columns) == 0
    assert (third.columns.tolist(), third.values.tolist()) == ([0], [1.5])
    assert table.get(9).values.tolist() == [1.5]


def test_a_table_starts_from_given_rows_or_a_file_but_only_at_first(job: TableJob, tmp_path: Path) -> None:
    table = job.table("t", 3, 2)
    table.start_from([[1, 2], [3, 4], [5, 6]])
    table.inc(1, [10, 10])
    table.clock()
    table.snapshot(tmp_path / "t.npz")
    again = job.table("again", 3, 2, consistency="asp")
    assert again.restore(tmp_path / "t.npz") == 1
    assert again.get(range(3)).tolist() == [[1, 2], [13, 14], [5, 6]]
    with pytest.raises(ServerError, match="table 'again' is in use"):
        again.restore(tmp_path / "t.npz")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t.get(4), "table 't' has rows 0 to 3; row 4 does not exist"),
        (lambda t: t.get([0, -1]), "row -1 does not exist"),
        (lambda t: t.get(1.5), "rows are 1.5; expected whole numbers"),
        (lambda t: t.inc(0, [1, 2, 3]), r"changes of shape \(3,\) for 1 rows of width 2"),
        (lambda t: t.inc([0, 1], [1, 2]), r"changes of shape \(2,\) for 2 rows"),
        (lambda t: t.inc(0, [1, 2], columns=[0, 1]), "with columns for 1 rows"),
        (lambda t: t.start_from(np.zeros((2, 2))), r"cannot start from an array of shape \(2, 2\)"),
    ],
)
def test_calls_that_do_not_fit_the_table_are_refused(job: TableJob, call: Any, words: str) -> None:
    table = job.table("t", 4, 2)
    with pytest.raises(ConfigError, match=words):
        call(table)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t.inc(0, [1.0], columns=[2]), "columns are 0 to 1"),
        (lambda t: t.inc(0, [1.0], columns=[0, 1]), "1 values for columns"),
        (lambda t: t.inc([0, 0], [SparseRow(np.array([0]), np.ones(1))] * 2), "each row once"),
        (lambda t: t.start_from(np.zeros((4, 2))), "sparse"),
    ],
)
def test_calls_that_do_not_fit_a_sparse_table_are_refused(job: TableJob, call: Any, words: str) -> None:
    table = job.table("t", 4, 2, sparse=True)
    with pytest.raises(ConfigError, match=words):
        call(table)


def test_a_name_is_used_once_and_a_job_must_be_open(job: TableJob) -> None:
    job.table("t", 4, 2)
    with pytest.raises(ConfigError, match=r"table 't' .* is open"):
        job.table("t", 4, 2)
    job.close()
    job.close()
    with pytest.raises(ConfigError, match="no job is open"):
        Table("u", 4, 2)
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        poseidon.ps.connect(timeout_s=0)


def test_all_tables_are_clocked_together(job: TableJob) -> None:
    tables = [job.table(name, 1, 1) for name in "ab"]
    job.clock()
    assert [table.now for table in tables] == [1, 1]


def test_a_closed_job_is_not_kept_alive() -> None:
    job = poseidon.ps.connect()
    is_there = weakref.ref(job)
    job.close()
    job.close()
    del job
    gc.collect()
    assert is_there() is None


@pytest.mark.parametrize(("error", "ending"), [(None, "leave"), (KeyError("mine"), "abandon")])
def test_a_job_left_open_ends_with_the_process(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, ending: str
) -> None:
    closing, endings = Closing(), []
    monkeypatch.setattr(poseidon.ps, "at_exit", closing.register)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    for name in ("leave", "abandon"):
        monkeypatch.setattr(Node, name, lambda _, name=name: endings.append(name))
    poseidon.ps.connect()
    closing.close()
    assert endings == [ending]
