"""Integers and bytes from every worker to every worker, and workers that cannot be a team."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from poseidon.errors import ConfigError
from poseidon.team.team import Team
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
        ({"POSEIDON_WIRE_INTERFACE": "none-such"}, "rank 2 .* cannot join: .*'none-such' has no IPv4 address"),
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
