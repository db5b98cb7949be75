from __future__ import annotations

from typing import Any

from torch import nn

from poseidon.checkpoints.states import parts_that_differ
from poseidon.data import ElasticSampler


class Drifting(nn.Linear):
    def checkpoint_parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}


def test_a_place_in_the_data_is_the_jobs_where_weights_are_each_workers_own() -> None:
    sampler = ElasticSampler(range(8), 4, seed=1, rank=0, size=2)
    _, own = parts_that_differ({"model": Drifting(1, 1), "optimizer": nn.Linear(1, 1), "sampler": sampler})
    assert list(own) == ["optimizer of this worker"]
