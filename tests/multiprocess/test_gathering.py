"""Integers from every worker to every worker, over the mesh and without it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from poseidon.team.team import Team
from poseidon.wire.mesh import MOST_WORDS
from ranks import run_ranks


def _gather() -> bool:
    team = Team(None, timeout_s=20.0)
    for size in (0, 1, 4, MOST_WORDS, MOST_WORDS + 1):
        everybody = [[rank * 10**15 + word for word in range(size)] for rank in range(team.size)]
        pending = team.start_gather(everybody[team.rank])
        assert team.gather_ints([team.rank]) == [[rank] for rank in range(team.size)]
        assert pending("the test") == everybody
    dist.barrier()
    team.close()
    return team.mesh is not None


@pytest.mark.parametrize("broken", [None, 0, 2])
def test_all_get_all_words_even_if_one_cannot_be_reached(broken: int | None) -> None:
    unreachable = {"POSEIDON_WIRE_INTERFACE": "none-such"}
    has_mesh = run_ranks(_gather, 3, env=[unreachable if rank == broken else {} for rank in range(3)])
    assert has_mesh == [broken is None] * 3
