from __future__ import annotations

from itertools import islice

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.caffe import process
from poseidon.caffe.io.hdf5 import HDF5Rows
from poseidon.caffe.io.sharding import DataSource, Share, endless, in_turns, locate, this_worker
from poseidon.errors import ConfigError
from poseidon.job.world import World

counts = st.integers(1, 40)
sizes = st.integers(1, 7)


def take(items, count):
    return list(islice(items, count))


@given(st.integers(0, 60), sizes, st.integers(0, 20))
def test_shares_are_disjoint_and_complete(count, size, first):
    owners = [row for rank in range(size) for row in Share(rank, size).rows(count, first)]
    assert sorted(owners) == list(range(count))


@given(counts, sizes, st.integers(1, 5), st.integers(1, 4))
def test_workers_together_read_what_one_worker_reads(count, size, batch, steps):
    alone = take(in_turns(lambda: range(count), Share()), batch * size * steps)
    streams = [in_turns(lambda: range(count), Share(rank, size)) for rank in range(size)]
    for step in range(steps):
        together = [row for stream in streams for row in take(stream, batch)]
        expected = alone[step * batch * size : (step + 1) * batch * size]
        assert sorted(together) == sorted(expected)


@given(counts, sizes, st.integers(1, 4))
def test_every_pass_gives_each_record_to_exactly_one_worker(count, size, passes):
    read = []
    for rank in range(size):
        own = len(Share(rank, size).rows(count * passes))
        read += take(in_turns(lambda: range(count), Share(rank, size)), own)
    assert sorted(read) == sorted(list(range(count)) * passes)


@given(st.integers(7, 40), sizes, st.integers(0, 2**32))
def test_shuffled_workers_see_their_own_share_once_per_pass(count, size, seed):
    passes = []
    for rank in range(size):
        share = Share(rank, size)
        stream = endless(count, share, np.random.default_rng([seed, rank]), "list")
        own = [take(stream, len(share.rows(count))) for _ in range(3)]
        assert all(sorted(one) == list(share.rows(count)) for one in own)
        passes += own[0]
    assert sorted(passes) == list(range(count))


def test_passes_are_shuffled_anew():
    stream = endless(50, Share(), np.random.default_rng(3), "list")
    first, second = take(stream, 50), take(stream, 50)
    assert first != list(range(50))
    assert first != second


def test_worker_without_records_is_told():
    with pytest.raises(ConfigError, match=r"list: has 2 records for 3 workers.*worker 2"):
        next(endless(2, Share(2, 3), np.random.default_rng(0), "list"))
    assert take(endless(2, Share(2, 3), None, "list"), 3) == [0, 1, 0]  # in order, turns go on over passes


@pytest.fixture
def files(tmp_path):
    paths = []
    start = 0
    for number, rows in enumerate((5, 1, 4)):
        paths.append(str(tmp_path / f"{number}.h5"))
        with h5py.File(paths[-1], "w") as file:
            file["row"] = np.arange(start, start + rows)
        start += rows
    return paths


def rows_of(batches, count, batch):
    return [int(value) for (rows,) in take(batches, count) for value in rows[:batch]]


def test_hdf5_rows_go_to_one_worker_each(files):
    for size in (1, 2, 3):
        workers = [HDF5Rows(files, ["row"], Share(rank, size), None).batches(2) for rank in range(size)]
        together = sorted(row for worker in workers for row in rows_of(worker, 5, 2))
        assert together == sorted(list(range(10)) * size)


def test_shuffled_hdf5_rows_are_seen_once_per_pass(files):
    seen = []
    for rank in range(2):
        share = Share(rank, 2)
        worker = HDF5Rows(files, ["row"], share, np.random.default_rng([1, rank])).batches(5 if rank == 0 else 1)
        own = rows_of(worker, 1 if rank == 0 else 5, 5)
        assert len(set(own)) == 5
        seen += own
    assert sorted(seen) == list(range(10))


def test_hdf5_share_without_rows_is_told(files):
    worker = HDF5Rows(files[1:2], ["row"], Share(1, 2), np.random.default_rng(0)).batches(1)
    with pytest.raises(ConfigError, match=r"1\.h5: has 1 records for 2 workers"):
        next(worker)


@settings(max_examples=20)
@given(st.integers(0, 5))
def test_own_files_are_read_whole(tmp_path_factory, rank):
    folder = tmp_path_factory.mktemp("parts")
    (folder / f"db_{rank}").touch()
    source = str(folder / "db")
    world = World(rank=rank, size=6)
    for written in (source, f"{source}/"):
        assert locate(written, False, True, world) == DataSource(f"{source}_{rank}")
    assert locate(source, None, True, world) == DataSource(f"{source}_{rank}")  # there is no whole one
    (folder / "db").touch()
    assert locate(source, None, True, world) == DataSource(source, Share(rank, 6))
    assert locate(source, True, False, world) == DataSource(source, Share(rank, 6))
    assert locate(source, None, False, world) == DataSource(source)  # testing reads everything, as in Caffe


def test_missing_own_file_says_how_to_make_it(tmp_path):
    with pytest.raises(ConfigError, match=r"worker 0 reads .*db_0 because shared_file_system is false.*partition-data"):
        locate(str(tmp_path / "db"), False, True, World())


def test_place_comes_from_the_environment(monkeypatch):
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (this_worker().rank, this_worker().size) == (2, 3)


def test_place_can_be_stated_by_a_script(monkeypatch):
    monkeypatch.setattr(process, "_place", process._Place())
    process.set_solver_count(4)
    process.set_solver_rank(3)
    assert (this_worker().rank, this_worker().size) == (3, 4)


def test_impossible_shares_are_refused():
    with pytest.raises(ConfigError, match="share 3 of 3"):
        Share(3, 3)
