"""Integers and bytes from every worker to every worker, and workers that cannot be a team."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from poseidon.errors import ConfigError
from poseidon.team.team import Team
from poseidon.team.tensors import list_tensors, sum_tensors
from ranks import run_ranks


def _gather() -> bool:
    team = Team(None, timeout_s=20.0)
    for size in (0, 1, 4, 1024, 300_000):
        everybody = [[rank * 10**15 + word for word in range(size)] for rank in range(team.size)]
        pending = team.start_gather(everybody[team.rank])
        assert team.gather_ints([team.rank]) == [[rank] for rank in range(team.size)]
        assert pending("the test") == everybody
    assert team.gather_bytes(bytes(team.rank), "the test") == [bytes(rank) for rank in range(team.size)]
    dist.barrier()
    team.close()
    return team.encrypts


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_all_get_what_all_have_however_long_it_is(encrypt: str) -> None:
    assert run_ranks(_gather, 3, env={"POSEIDON_WIRE_ENCRYPT": encrypt}) == [encrypt == "1"] * 3


def _refused() -> str:
    with pytest.raises(ConfigError) as caught:
        Team(None, timeout_s=20.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"POSEIDON_WIRE_INTERFACE": "none-such"}, "rank 2 .* cannot join: .*'none-such' has no address"),
        ({"POSEIDON_SECRET": "short"}, "rank 2 .* cannot join: the job's secret .* has 5 bytes"),
        ({"POSEIDON_SECRET": "another secret, as long"}, "rank 2 .* has another secret than rank 0 .*POSEIDON_SECRET"),
        ({"POSEIDON_WIRE_ENCRYPT": "1"}, "rank 2 .* encrypts and rank 0 .* does not; set POSEIDON_WIRE_ENCRYPT alike"),
        ({"POSEIDON_SECRET": "", "POSEIDON_SECRET_FILE": "/nowhere"}, "rank 2 .* cannot join: .*/nowhere"),
    ],
)
def test_workers_that_do_not_fit_together_are_refused_by_name_on_all_of_them(odd: dict[str, str], says: str) -> None:
    messages = run_ranks(_refused, 3, env=[odd if rank == 2 else {} for rank in range(3)])
    assert len(set(messages)) == 1
    with pytest.raises(ConfigError, match=says):
        raise ConfigError(messages[0])


def _add_and_list() -> tuple[list[bytes], list[list[float]]]:
    team = Team(None)
    summed = []
    with mock.patch.object(dist, "all_reduce", None), mock.patch.object(dist, "all_gather", None):
        for count, dtype in itertools.product((0, 1, 7, 100_003), (torch.float32, torch.bfloat16, torch.int64)):
            mine = (torch.arange(count) % 251 * 10**team.rank).to(dtype)
            total = sum_tensors(team, mine, "a sum")
            expected = torch.zeros_like(mine)
            for rank in range(team.size):
                expected += (torch.arange(count) % 251 * 10**rank).to(dtype)
            assert total.dtype is dtype
            assert torch.equal(total, expected), "they are added in rank order"
            summed.append(total.view(torch.uint8).numpy().tobytes())
        listed = list_tensors(team, torch.full((2, 2), float(team.rank)), "a list")
    team.close()
    return summed, [part.flatten().tolist() for part in listed]


def test_tensors_that_no_route_carries_are_added_and_listed_over_the_wire() -> None:
    results = run_ranks(_add_and_list, 3)
    assert results[0] == results[1] == results[2]
    assert results[0][1] == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
