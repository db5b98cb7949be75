from __future__ import annotations

from itertools import islice

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.caffe import process
from poseidon.caffe.io.hdf5 import HDF5Rows
from poseidon.caffe.io.sharding import DataSource, Share, endless, locate, this_worker
from poseidon.errors import ConfigError
from poseidon.job.world import World

counts = st.integers(1, 40)
sizes = st.integers(1, 7)


def take(items, count):
    return list(islice(items, count))


def records(count, share, batch, seed=None, first=0, skip=0):
    return (one.record for one in endless(count, share, batch, seed, first, skip))


seeds = st.none() | st.integers(0, 2**62)


@given(counts, sizes, st.integers(1, 5), st.integers(1, 4), seeds, st.integers(0, 9))
def test_workers_together_read_what_one_worker_reads(count, size, batch, steps, seed, skip):
    alone = take(records(count, Share(), batch * size, seed, 0, skip), batch * size * steps)
    streams = [records(count, Share(rank, size), batch, seed, 0, skip) for rank in range(size)]
    assert [row for _ in range(steps) for stream in streams for row in take(stream, batch)] == alone
    assert alone == take(records(count, Share(), 1, seed), skip + len(alone))[skip:]


@given(st.integers(0, 200), sizes, st.integers(1, 5))
def test_every_place_belongs_to_one_worker(number, size, batch):
    shares = [Share(rank, size) for rank in range(size)]
    places = [share.position(number, batch) for share in shares]
    assert len(set(places)) == size
    owners = [share.owns(np.array(places), batch).tolist() for share in shares]
    assert owners == np.eye(size, dtype=bool).tolist()


@given(counts, sizes, st.integers(1, 5), st.integers(0, 50), seeds)
def test_reading_can_go_on_anywhere(count, size, batch, first, seed):
    share = Share(0, size)
    whole = take(endless(count, share, batch, seed), first + 20)
    assert take(endless(count, share, batch, seed, first), 20) == whole[first:]
    assert len({one.number for one in whole}) == len(whole)


@given(st.integers(1, 6), sizes, st.integers(1, 4), st.integers(0, 2**32))
def test_shuffled_records_are_seen_once_per_pass_whoever_reads_them(steps, size, batch, seed):
    count = steps * size * batch
    streams = [records(count, Share(rank, size), batch, seed) for rank in range(size)]
    for _ in range(3):
        assert sorted(row for stream in streams for row in take(stream, steps * batch)) == list(range(count))


def test_passes_are_shuffled_anew():
    stream = records(50, Share(), 5, 3)
    first, second = take(stream, 50), take(stream, 50)
    assert first != list(range(50))
    assert first != second


def test_turns_go_on_over_passes():
    assert take(records(2, Share(2, 3), 1), 3) == [0, 1, 0]
    assert sorted(take(records(2, Share(2, 3), 1, 4), 40)) != [0] * 40


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


def rows_of(batches, count):
    return [int(value) for batch in take(batches, count) for value in made(batch)[0]]


def made(assembly):
    for part in assembly.parts():
        part()
    return assembly.finish()


def test_hdf5_rows_are_read_in_turns(files):
    for seed in (None, 7):
        alone = rows_of(HDF5Rows(files, ["row"], Share()).batches(2, 0, seed), 15)
        for size in (1, 2, 3):
            workers = [HDF5Rows(files, ["row"], Share(rank, size)).batches(2, 0, seed) for rank in range(size)]
            together = [row for _ in range(5) for worker in workers for row in rows_of(worker, 1)]
            assert together == alone[: 10 * size]
        assert all(sorted(alone[start : start + 10]) == list(range(10)) for start in (0, 10, 20))
        assert (alone == list(range(10)) * 3) == (seed is None)


@pytest.mark.parametrize("seed", [None, 5])
def test_hdf5_rows_go_on_anywhere(files, seed):
    def rows(first):
        return HDF5Rows(files, ["row"], Share(1, 2)).batches(2, first, seed)

    whole = rows_of(rows(0), 12)
    for first in (2, 4, 10, 14):
        assert rows_of(rows(first), 4) == whole[first : first + 8]


def test_hdf5_files_without_rows_are_told(tmp_path):
    with h5py.File(tmp_path / "none.h5", "w") as file:
        file["row"] = np.zeros(0)
    with pytest.raises(ConfigError, match=r"none\.h5: hold no rows"):
        next(HDF5Rows([str(tmp_path / "none.h5")], ["row"], Share(1, 2)).batches(1))


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
