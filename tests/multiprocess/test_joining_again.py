"""Workers that have failed to join meet the others when they try again."""

from __future__ import annotations

import socket
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from poseidon.job import world
from ranks import run_ranks


def join_after_a_failure() -> float:
    rank, port = dist.get_rank(), torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port += listener.getsockname()[1]
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    if rank == 1:
        # Nobody else comes.
        with pytest.raises(RuntimeError):
            dist.init_process_group(
                "gloo", store=dist.HashStore(), rank=1, world_size=2, timeout=timedelta(milliseconds=1)
            )
    # In elastic jobs workers try again, and only these touch what torch notes of groups.
    with mock.patch.object(world, "this_job", object):
        world._make_group(world.World(rank, 2, rank, 2, "127.0.0.1", int(port)), "gloo", 2.0)
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def test_one_that_failed_to_join_looks_for_the_others_under_the_same_name() -> None:
    assert run_ranks(join_after_a_failure, 2) == [2.0, 2.0]
