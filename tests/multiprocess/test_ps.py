"""Tables over real connections: several processes, dedicated servers, deaths, snapshots."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import poseidon.ps
from poseidon.errors import PoseidonError, WorkerLostError
from poseidon.team.watch import elders
from ranks import run_ranks
from run_jobs import run_poseidon


def add_up(options: dict[str, Any], clocks: int, servers: list[int] | None) -> Any:
    with poseidon.ps.connect(servers=servers, timeout_s=20) as job:
        if not job.is_worker:
            return None
        table = job.table("sums", rows=23, width=len(job.workers), **options)
        column = job.workers.index(job.rank)
        delta = np.zeros((23, len(job.workers)))
        delta[:, column] = 1
        reads = []
        for _ in range(clocks):
            reads.append(table.get(range(23)))
            table.inc(range(23), delta)
            assert (table.get(range(23))[:, column] == table.now + 1).all()
            table.clock()
        return reads, dict(table.staleness_seen), job.losses


@pytest.mark.parametrize(
    ("options", "servers"),
    [
        ({"consistency": "bsp"}, None),
        ({"consistency": "bsp", "eager": False}, [1, 3]),
        ({"consistency": "ssp", "staleness": 2, "managed": True}, None),
        ({"consistency": "ssp", "staleness": 1, "eager": False}, [0]),
        ({"consistency": "asp"}, [1, 3]),
    ],
    ids=str,
)
def test_reads_keep_the_bound(options: dict[str, Any], servers: list[int] | None) -> None:
    results = [result for result in run_ranks(add_up, 4, options, 6, servers) if result is not None]
    assert len(results) == 4 - len(servers or [])
    bound = {"bsp": 0, "ssp": options.get("staleness", 0), "asp": 6}[options["consistency"]]
    for reads, staleness, losses in results:
        assert max(staleness) <= bound
        assert losses == {}
        for clock, read in enumerate(reads):
            assert read.min() >= clock - bound
            if options["consistency"] == "bsp":
                assert (read == clock).all()


def float_sums() -> bytes:
    generator = np.random.default_rng(dist.get_rank())
    with poseidon.ps.connect(timeout_s=20) as job:
        table = job.table("floats", rows=5, width=40)
        for _ in range(5):
            table.inc(range(5), generator.standard_normal((5, 40)) * 10.0 ** generator.integers(-4, 4))
            table.clock()
        return bytes(table.get(range(5)).tobytes())


def test_bsp_gives_all_workers_the_same_bits_every_time() -> None:
    first, second = run_ranks(float_sums, 3), run_ranks(float_sums, 3)
    assert len({*first, *second}) == 1


def die(victim: int, servers: list[int] | None, consistency: str, how: str) -> Any:
    # Only a stopped worker is found out by the deadline; the others should not be taken for one on a busy machine.
    with poseidon.ps.connect(servers=servers, timeout_s=12 if how == "stop" else 20) as job:
        if not job.is_worker:
            return None
        table = job.table("t", 16, 4, consistency=consistency, staleness=1 if consistency == "ssp" else 0)
        for _ in range(10):
            before = table.get(range(16))
            table.inc(range(16), np.ones((16, 4)))
            if table.now == 3 and job.rank == victim:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "stop":
                    # Its connections stay open: only the deadline tells.
                    os.kill(os.getpid(), signal.SIGSTOP)
            table.clock()
    return before, job.losses


@pytest.mark.parametrize(
    ("consistency", "servers", "how"),
    [("ssp", None, "kill"), ("ssp", None, "stop"), ("ssp", [3], "stop"), ("asp", [3], "kill"), ("asp", None, "stop")],
)
def test_the_others_go_on_without_a_dead_worker(consistency: str, servers: list[int] | None, how: str) -> None:
    results = run_ranks(die, 4, 1, servers, consistency, how, lost=[1])
    for rank, result in enumerate(results):
        if rank == 1 or rank in (servers or []):
            continue
        last, losses = result
        assert list(losses) == [1]
        assert losses[1] <= 4
        # Two workers did 9 steps each before this read, less what the staleness and the loss may cost.
        assert last.min() >= 9


def die_under_bsp(how: str) -> str:
    try:
        die(2, None, "bsp", how)
    except WorkerLostError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_under_bsp_a_death_ends_the_job_and_names_the_dead(how: str) -> None:
    for rank, text in enumerate(run_ranks(die_under_bsp, 3, how, lost=[2])):
        if rank != 2:
            assert "worker 2 is lost after clock" in text


def damage_heartbeats() -> str:
    """Use a table for as long as possible; what worker 1 sends next to worker 0 after its heartbeats is no message."""
    give_up_at = time.monotonic() + 30
    try:
        with poseidon.ps.connect(timeout_s=60) as job:
            table = job.table("t", 16, 4)
            while time.monotonic() < give_up_at:
                if table.now == 3 and job.rank == 1:
                    (watch,) = elders(1)
                    # Past the encryption too, as if it had happened on the way.
                    socket.socket.sendall(watch._mesh._peers[0].connection, b"\x17\x03\x03\x00\x40" + bytes(64))
                table.get(range(16))
                table.inc(range(16), np.ones((16, 4)))
                table.clock()
    except WorkerLostError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_damage_among_the_heartbeats_ends_the_job(encrypt: str) -> None:
    first, second, third = run_ranks(damage_heartbeats, 3, env={"POSEIDON_WIRE_ENCRYPT": encrypt})
    assert re.search(r"worker (1 is lost.* heartbeats broke: .* damaged|0 was given up by the others)", first), first
    assert re.search(r"worker (0 is lost|1 was given up by the others)", second), second
    assert re.search(r"worker [01] is lost", third), third


def raise_in_the_middle() -> str:
    try:
        with poseidon.ps.connect(timeout_s=60) as job:
            table = job.table("t", 4, 4)
            table.get(0)
            table.clock()
            if job.rank == 0:
                raise KeyError("mine")
            table.get(0)
    except (KeyError, PoseidonError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_an_exception_in_one_worker_reaches_the_others_at_once() -> None:
    first, second = run_ranks(raise_in_the_middle, 2, timeout_s=30)
    assert first == "KeyError: 'mine'"
    assert second.startswith("WorkerLostError: worker 0 is lost")


def save(path: str, sparse: bool) -> None:
    with poseidon.ps.connect(timeout_s=20) as job:
        table = job.table("t", 11, 6, "float64", consistency="bsp", sparse=sparse)
        for step in range(3):
            for row in range(11):
                table.inc(row, [float(row), 1.0], columns=[1, 4]) if sparse else table.inc(row, np.full(6, row + step))
            table.clock()
        if job.rank == 1:
            table.snapshot(path)
        # The others are clocks ahead of the file meanwhile, as far as they may be.
        table.inc(3, [100.0], columns=[2]) if sparse else table.inc(3, np.full(6, 100))
        table.clock()


def load(path: str, sparse: bool) -> Any:
    with poseidon.ps.connect(timeout_s=20, servers=[2]) as job:
        if not job.is_worker:
            return None
        table = job.table("other name", 11, 6, "float64", consistency="ssp", staleness=3, sparse=sparse)
        clock = table.restore(path)
        return clock, table.get(range(11))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_snapshot_is_restored_by_another_job(sparse: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "table.npz")
    run_ranks(save, 2, path, sparse)
    assert [file.name for file in tmp_path.iterdir()] == ["table.npz"]
    for clock, rows in run_ranks(load, 3, path, sparse)[:2]:
        assert clock == 3
        for row in range(11):
            if sparse:
                assert rows[row].columns.tolist() == [1, 4]
                assert rows[row].values.tolist() == [6.0 * row, 6.0]
            else:
                assert rows[row].tolist() == [2 * (3 * row + 3)] * 6


def disagree() -> str:
    try:
        with poseidon.ps.connect(timeout_s=10) as job:
            table = job.table("t", 4, 4 + job.rank)
            table.get(range(4))
            table.clock()
            table.get(range(4))
    except PoseidonError as error:
        return str(error)
    return "nothing happened"


def test_a_table_opened_differently_is_refused_with_both_shapes() -> None:
    texts = run_ranks(disagree, 2)
    assert any("width=4" in text and "width=5" in text for text in texts)
    assert all(text != "nothing happened" for text in texts)


ENDING = """
import poseidon.ps

job = poseidon.ps.connect(timeout_s=20)
table = job.table("t", 4, 4, consistency="ssp", staleness=1)
for _ in range(3 + 5 * job.rank):
    table.inc(0, [1.0] * 4)
    table.clock()
if job.rank == 0 and {fails}:
    raise KeyError("mine")
print("steps", table.now)
"""


def test_workers_that_end_without_closing_wait_for_each_other(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING.format(fails=False))
    ended = run_poseidon("--nproc", "2", script, folder=tmp_path)
    assert ended.status == 0, ended.err
    assert sorted(line.split()[-1] for line in ended.out.splitlines() if "steps" in line) == ["3", "8"]
    assert "lost" not in ended.err


def test_a_worker_that_fails_outside_of_a_with_block_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING.format(fails=True))
    ended = run_poseidon("--nproc", "2", script, folder=tmp_path)
    assert ended.status == 1
    assert "worker 0 on localhost failed first" in ended.err
    assert "KeyError: 'mine'" in ended.err
