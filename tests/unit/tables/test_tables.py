from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.errors import ConfigError, ServerError
from poseidon.tables import snapshot
from poseidon.tables.adoption import Adoption, successor
from poseidon.tables.cache import TableCache
from poseidon.tables.rows import Patch
from poseidon.tables.tables import Reply, TableServer, TableSpec


def patch_of(rows: list[int], values: Any, width: int = 2) -> Patch:
    filled = np.broadcast_to(np.asarray(values, np.float32).reshape(-1, 1), (len(rows), width))
    return Patch(np.array(rows, np.int64), filled.copy())


def index(*rows: int) -> Any:
    return np.array(rows, np.int64)


class Pair:
    """A server and its workers' copies, with messages that arrive at once."""

    def __init__(self, workers: int = 2, **options: Any) -> None:
        self.spec = TableSpec("t", 6, 2, **options)
        self.server = TableServer(self.spec, range(workers))
        self.caches = [TableCache(self.spec) for _ in range(workers)]
        self.replies: list[Reply] = []

    def deliver(self, replies: list[Reply]) -> None:
        self.replies += replies
        for reply in replies:
            self.caches[reply.worker].receive(0, reply)

    def get(self, worker: int, *rows: int) -> Any:
        cache = self.caches[worker]
        for _, wanted in cache.ask(cache.stale(index(*rows))):
            self.deliver(self.server.get(worker, cache.clock, wanted))
        return cache.read(index(*rows)).values[:, 0].tolist()

    def step(self, worker: int, rows: list[int], values: Any) -> None:
        cache = self.caches[worker]
        cache.inc(patch_of(rows, values))
        for _, patch in cache.take_updates():
            self.server.inc(worker, patch)
        self.deliver(self.server.clock(worker, cache.tick()))


def test_bsp_adds_updates_in_the_order_of_workers_when_a_clock_is_complete() -> None:
    sums = []
    for order in ([0, 1, 2], [2, 0, 1]):
        pair = Pair(3)
        for worker in order:
            assert not pair.server.state().values.any()
            pair.step(worker, [1], [1e8, 1.0, -1e8][worker])
        sums.append(pair.get(0, 1))
    # In the order of workers the 1 is lost to rounding; 2, 0, 1 would keep it.
    assert sums == [[0.0], [0.0]]


def test_an_eager_server_sends_only_changed_rows_to_those_that_hold_them() -> None:
    pair = Pair(3, consistency="ssp", staleness=1)
    pair.get(0, 0, 1, 2)
    pair.get(1, 2, 3)
    pair.replies.clear()
    pair.step(2, [2, 5], 1.0)
    pair.step(1, [3], 1.0)
    pair.step(0, [0], 1.0)
    pushed = {reply.worker: reply.patch.rows.tolist() for reply in pair.replies}
    # Own changes come back to nobody; worker 2 holds nothing.
    assert pushed == {0: [2], 1: [2]}
    assert all(reply.is_push and reply.fresh == 1 for reply in pair.replies)
    pair.replies.clear()
    assert pair.get(0, 0, 1, 2) == [1.0, 0.0, 1.0]
    assert pair.replies == []


def test_a_server_that_is_not_eager_is_asked_again_when_copies_are_too_old() -> None:
    pair = Pair(2, consistency="ssp", staleness=1, eager=False)
    assert pair.get(0, 4) == [0.0]
    for _ in range(2):
        pair.step(0, [4], 1.0)
        pair.step(1, [4], 10.0)
    assert len(pair.replies) == 1
    assert pair.get(0, 4) == [22.0]
    assert len(pair.replies) == 2


def test_the_staleness_that_reads_saw_is_counted() -> None:
    pair = Pair(2, consistency="ssp", staleness=2)
    pair.get(0, 0, 1)
    pair.step(0, [0], 1.0)
    pair.get(0, 0, 1)
    pair.step(0, [0], 1.0)
    pair.get(0, 0)
    assert dict(pair.caches[0].staleness_seen) == {0: 2, 1: 2, 2: 1}
    pair.step(1, [], [])
    pair.get(0, 0)
    assert pair.caches[0].staleness_seen[1] == 3


def test_early_updates_are_the_largest_relative_changes_and_leave_once() -> None:
    spec = TableSpec("t", 6, 2, managed=True)
    cache = TableCache(spec)
    cache.receive(0, Reply(0, patch_of([0, 1, 2], [100.0, 1.0, 10.0]), 0, 0))
    cache.inc(patch_of([0, 1, 2], [5.0, 1.0, 1.0]))
    row_bytes = 8 + 2 * 4
    first = cache.take_early(0, row_bytes)
    assert first is not None
    assert first.rows.tolist() == [1]
    second = cache.take_early(0, 2 * row_bytes)
    assert second is not None
    assert second.rows.tolist() == [0, 2]
    assert cache.take_early(0, row_bytes) is None
    assert cache.take_updates() == []


def test_servers_send_early_what_changed_most_but_never_part_of_a_bsp_step() -> None:
    pair = Pair(2, consistency="ssp", staleness=3, managed=True)
    pair.get(0, 0, 1, 2)
    pair.server.inc(1, patch_of([0, 1], [2.0, 3.0]))
    early = pair.server.early(0, 16)
    assert early is not None
    assert early.patch.rows.tolist() == [0]
    assert not early.is_push
    pair.deliver([early])
    assert pair.get(0, 0, 1) == [2.0, 0.0]
    later = pair.server.early(0, 16)
    assert later is not None
    assert later.patch.rows.tolist() == [1]
    assert pair.server.early(0, 16) is None
    strict = Pair(2, managed=True)
    strict.get(0, 0)
    strict.server.inc(1, patch_of([0], 1.0))
    assert strict.server.early(0, 16) is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda server: server.inc(7, patch_of([0], 1.0)), r"rank 7 is not a worker of table 't': \[0, 1\] are"),
        (lambda server: server.inc(0, patch_of([1], 1.0)), "rank 0 named row 1 .* place 0 of 2 holds every 2th"),
        (lambda server: server.get(0, 0, index(6)), "named row 6 of table 't', which has 6 rows"),
        (lambda server: server.get(0, 0, index(-2)), "named row -2"),
        (lambda server: server.clock(0, 2), "worker 0 reports clock 2 after clock 0"),
    ],
)
def test_what_a_place_does_not_hold_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ServerError, match=words):
        call(TableServer(TableSpec("t", 6, 2), [0, 1], 0, 2))


def test_rows_are_replaced_only_before_anybody_works_with_them() -> None:
    pair = Pair(2)
    pair.server.replace(patch_of([3], 7.0))
    assert pair.get(0, 3) == [7.0]
    with pytest.raises(ServerError, match="table 't' is in use at clock 0"):
        pair.server.replace(patch_of([3], 8.0))


def test_a_server_refuses_rows_it_sent_for_another_place() -> None:
    cache = TableCache(TableSpec("t", 6, 2), places=2)
    with pytest.raises(ServerError, match="place 0 of table 't' sent rows it does not hold"):
        cache.receive(0, Reply(0, patch_of([1], 1.0), 0, 0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 0}, "0 rows of width 2"),
        ({"dtype": "complex64"}, "unknown dtype for table 't': 'complex64'; known: float32"),
        ({"consistency": "bsp", "staleness": 3}, "staleness is 3 with consistency 'bsp'"),
    ],
)
def test_a_table_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TableSpec(**{"name": "t", "rows": 6, "width": 2, **options})


def test_a_spec_survives_the_wire() -> None:
    spec = TableSpec("t", 6, 2, "int32", "ssp", 4, sparse=True, managed=True)
    assert TableSpec.from_json(spec.to_json()) == spec


def test_an_orphaned_place_gets_the_freshest_copies() -> None:
    spec = TableSpec("t", 6, 2, consistency="ssp", staleness=2)
    caches = {worker: TableCache(spec, places=2) for worker in (0, 2)}
    caches[0].receive(1, Reply(0, patch_of([1, 3], [10.0, 30.0]), 4, 0))
    caches[2].receive(1, Reply(2, patch_of([3, 5], [33.0, 55.0]), 5, 0))
    # Sent to the dead server: delivered, as far as anybody knows. Not sent yet: to be sent to the new one.
    caches[0].inc(patch_of([1], 1.0))
    caches[0].take_updates()
    caches[0].inc(patch_of([1], 0.5))
    adoption = Adoption(spec, [0, 1, 2], gone=[1], place=1, places=2)
    for worker, cache in caches.items():
        for fresh, patch in cache.hand_over(1):
            adoption.offer(fresh, patch)
        assert worker in adoption.awaited
        adoption.report(worker, 6 + worker)
    assert not adoption.awaited
    server = adoption.server
    assert server.state().values[:, 0].tolist() == [11.0, 33.0, 55.0]
    assert (server.clocks.slowest, server.clocks.clock_of(2)) == (6, 8)
    [(place, patch)] = caches[0].take_updates()
    server.inc(0, patch)
    [reply] = server.get(0, 6, index(1))
    caches[0].receive(place, reply)
    assert caches[0].read(index(1)).values[0, 0] == 11.5


def test_the_next_server_alive_takes_over() -> None:
    assert successor([0, 2, 3], [2], 1) == 3
    assert successor([0, 2, 3], [2, 3], 2) == 0
    assert successor([0, 2, 3], [0, 2, 3], 0) is None


@pytest.mark.parametrize("sparse", [False, True])
def test_snapshots_are_read_back_and_leave_nothing_else_behind(sparse: bool, tmp_path: Path) -> None:
    spec = TableSpec("t", 6, 2, sparse=sparse)
    rows = spec.make_rows()
    content = patch_of([1, 4], [2.0, 3.0])
    if sparse:
        content = Patch(content.rows, content.values.reshape(-1), np.array([0, 1, 0, 1]), np.array([0, 2, 4]))
    rows.put(content)
    path = tmp_path / "t.npz"
    path.write_bytes(b"an older file")
    snapshot.save(path, spec, 5, [rows.take(index(1)), rows.take(index(4))])
    clock, patches = snapshot.load(path, spec)
    assert clock == 5
    assert [patch.rows.tolist() for patch in patches] == [[1], [4]]
    assert [patch.values.ravel().tolist() for patch in patches] == [[2.0, 2.0], [3.0, 3.0]]
    assert list(tmp_path.iterdir()) == [path]


def test_a_snapshot_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.npz"
    path.write_bytes(b"an older file")

    def fill_the_disk(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", fill_the_disk)
    with pytest.raises(ConfigError, match=r"cannot write snapshot of a table .*t\.npz: no space left"):
        snapshot.save(path, TableSpec("t", 6, 2), 0, [])
    assert path.read_bytes() == b"an older file"
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_another_shape_or_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    snapshot.save(path, TableSpec("t", 6, 2), 0, [])
    with pytest.raises(ConfigError, match="does not fit table 'u': it has rows 6, not 7, dtype float32, not float64"):
        snapshot.load(path, TableSpec("u", 7, 2, "float64"))
    np.savez(path, other=np.arange(3))
    with pytest.raises(ConfigError, match="is not a snapshot of a table"):
        snapshot.load(path, TableSpec("t", 6, 2))
    np.save(tmp_path / "pickled.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ConfigError, match="is not a snapshot of a table"):
        snapshot.load(tmp_path / "pickled.npy", TableSpec("t", 6, 2))


def test_a_worker_may_limit_its_own_staleness_and_still_gets_what_it_needs() -> None:
    pair = Pair(2, consistency="ssp", staleness=3)
    pair.get(0, 1)
    pair.get(1, 1)
    pair.caches[0].limit(1)
    pair.step(0, [1], 1.0)
    assert not len(pair.caches[0].stale(index(1)))
    pair.step(0, [1], 1.0)
    # By the table's own bound worker 0 could read on.
    assert pair.caches[0].stale(index(1)).tolist() == [1]
    assert pair.server.clocks.awaited_by(pair.caches[0].clock) == []
    assert pair.server.clocks.awaited_by(pair.caches[0].awaited_clock) == [1]
    pair.step(1, [1], 10.0)
    assert pair.get(0, 1) == [12.0]


@pytest.mark.parametrize(
    ("options", "staleness"),
    [
        ({"consistency": "ssp", "staleness": 2}, 3),
        ({"consistency": "ssp", "staleness": 2}, -1),
        ({"consistency": "ssp", "staleness": 2, "eager": False}, 1),
        ({"consistency": "asp"}, 0),
    ],
)
def test_limits_that_a_table_cannot_keep_are_refused(options: Any, staleness: int) -> None:
    with pytest.raises(ConfigError, match=f"staleness of {staleness}"):
        TableCache(TableSpec("t", 6, 2, **options)).limit(staleness)
