import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.job.world import World, init

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_a_process_that_nobody_launched_is_alone() -> None:
    assert World.from_environment({}) == World(rank=0, size=1, local_rank=0)


def test_torchruns_words_are_read() -> None:
    assert World.from_environment(TORCHRUN) == World(5, 8, 1, 4, "node7", 29500)


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert World.from_environment().rank == 5


def test_a_launcher_may_leave_local_words_out() -> None:
    world = World.from_environment(without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    assert (world.local_rank, world.local_size) == (5, None)


def test_one_worker_needs_nobody_to_meet() -> None:
    assert World.from_environment({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"RANK": "eight"}, "RANK is 'eight', expected a whole number"),
        ({"RANK": "1.5"}, "RANK is '1.5'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"MASTER_PORT": "0"}, r"\(MASTER_PORT\) is 0, expected a port from 1 to 65535"),
        ({"MASTER_PORT": "65536"}, r"\(MASTER_PORT\) is 65536, expected a port"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x'"),
        ({"RANK": "8"}, "rank 8 of 8 workers"),
        ({"RANK": "-1"}, "rank -1 of 8 workers"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0 workers"),
    ],
)
def test_words_that_make_no_sense_are_refused(changes: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        World.from_environment({**TORCHRUN, **changes})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_word_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        World.from_environment(without(TORCHRUN, name))


def test_slurms_words_are_read() -> None:
    assert World.from_environment(SLURM) == World(3, 4, 1, None, "gpu03", 20000 + 123456 % 12000)


def test_all_tasks_of_a_slurm_job_meet_at_one_place_and_other_jobs_elsewhere() -> None:
    worlds = [World.from_environment({**SLURM, "SLURM_PROCID": str(rank)}) for rank in range(4)]
    assert len({(world.master_addr, world.master_port) for world in worlds}) == 1
    other = World.from_environment({**SLURM, "SLURM_JOB_ID": "123457"})
    assert other.master_port != worlds[0].master_port


@given(st.integers(0, 2**32))
def test_slurms_port_is_one_that_users_may_open(job: int) -> None:
    port = World.from_environment({**SLURM, "SLURM_JOB_ID": str(job)}).master_port
    assert port is not None
    assert 1024 < port < 65536


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,09],big1", "gpu03"),
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("rack2-n[11,13]", "rack2-n11"),
        ("a1,b[2-3]", "a1"),
        ("10.0.0.5", "10.0.0.5"),
    ],
)
def test_the_first_host_of_a_node_list_is_found(nodes: str, first: str) -> None:
    assert World.from_environment({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_addr == first
    assert (
        World.from_environment({**without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_NODELIST": nodes}).master_addr == first
    )


def test_a_given_meeting_place_counts_more_than_slurms() -> None:
    world = World.from_environment({**SLURM, "MASTER_ADDR": "here", "MASTER_PORT": "4000"})
    assert (world.master_addr, world.master_port) == ("here", 4000)


def test_torchrun_inside_a_slurm_job_counts() -> None:
    assert World.from_environment({**SLURM, **TORCHRUN}).rank == 5


def test_one_slurm_task_is_alone() -> None:
    assert World.from_environment({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).size == 1
    assert World.from_environment({"SLURM_PROCID": "0"}) == World()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"SLURM_PROCID": "first"}, "SLURM_PROCID is 'first'"),
        ({"SLURM_PROCID": "4"}, "rank 4 of 4 workers"),
        ({"SLURM_JOB_ID": "12.batch"}, "SLURM_JOB_ID is '12.batch'"),
        ({"SLURM_LOCALID": "?"}, r"SLURM_LOCALID is '\?'"),
    ],
)
def test_slurm_words_that_make_no_sense_are_refused(changes: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        World.from_environment({**SLURM, **changes})


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Record calls of torch's init_process_group instead of waiting for other workers."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in (*TORCHRUN, *SLURM, "NCCL_MAX_NCHANNELS"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_alone_init_does_nothing(joined: list[Any]) -> None:
    assert init() == World()
    assert not joined


def test_init_joins_the_job_of_the_environment(joined: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert init(timeout_s=7) == World.from_environment(TORCHRUN)
    assert init("mpi").rank == 5
    (backend,), options = joined[0]
    assert backend == "gloo"
    assert options == {
        "init_method": "tcp://node7:29500",
        "rank": 5,
        "world_size": 8,
        # Six times as long as Poseidon itself waits: torch cannot know who is busy.
        "timeout": timedelta(seconds=42),
    }
    assert joined[1][0] == ("mpi",)


def test_init_leaves_a_group_that_exists_alone(joined: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    assert init().rank == 5
    assert not joined


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize(("local_size", "channels"), [("1", "1"), ("4", None)])
def test_one_nccl_channel_is_enough_for_ethernet_only(
    local_size: str, channels: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {**TORCHRUN, "LOCAL_WORLD_SIZE": local_size}
    monkeypatch.setattr(os, "environ", environ)
    init()
    assert environ.get("NCCL_MAX_NCHANNELS") == channels
    environ["NCCL_MAX_NCHANNELS"] = "8"
    init()
    assert environ["NCCL_MAX_NCHANNELS"] == "8", "what the user chose stands"
