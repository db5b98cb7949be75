"""Shards: who keeps replicas, how they are dealt anew, and which are lost."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from poseidon.checkpoints.replicas import find_sources
from poseidon.checkpoints.shards import (
    Dealt,
    RunState,
    Source,
    ValueRun,
    assemble,
    exact_bytes,
    exact_runs,
    pack,
    plan_parts,
    replica_ranks,
    take_parts,
)
from poseidon.errors import MismatchError
from poseidon.team.topology import Topology

SIZES = (130, 7, 64)
"""Values of each parameter."""
HOST = torch.device("cpu")


def cut_randomly(chance: random.Random, owners: int) -> list[list[ValueRun]]:
    """Deal all values to owners, in runs of any length."""
    found: list[list[ValueRun]] = [[] for _ in range(owners)]
    for parameter, size in enumerate(SIZES):
        cuts = sorted({0, size, *(chance.randrange(size) for _ in range(chance.randrange(6)))})
        for start, stop in itertools.pairwise(cuts):
            found[chance.randrange(owners)].append(ValueRun(parameter, start, stop))
    return found


def state_of(run: ValueRun) -> RunState:
    """Return a state in which every value is known; parameter 1 has none, and only parameter 2 has exact weights."""
    if run.parameter == 1:
        return RunState(run, {})
    values = torch.arange(run.start, run.stop)
    entries: dict[str, Any] = {
        "step": torch.tensor(9.0 + run.parameter),
        "sign": values.bool(),
        "mean": values.double() / 3,
        "square": values.float() ** 2,
        "count": 4 + run.parameter,
    }
    return RunState(run, entries, values.to(torch.float32) + 0.5 if run.parameter == 2 else None)


@pytest.mark.parametrize("seed", range(8))
def test_shards_are_dealt_to_any_owners_with_the_same_bits(seed: int) -> None:
    chance = random.Random(seed)
    before, after = cut_randomly(chance, chance.randint(1, 4)), cut_randomly(chance, chance.randint(1, 4))
    copies = [pack((0, number, 5), [state_of(run) for run in runs]) for number, runs in enumerate(before)]
    # Two of the ranks that are left have everything.
    sources = [Source(number % 2, copy.manifest, copy) for number, copy in enumerate(copies)]
    rows = [copy.row for copy in copies]
    for wanted in after:
        parts = plan_parts(sources, wanted)
        came = {
            holder: take_parts([part for part in parts if sources[part.source].holder == holder], rows)
            for holder in (0, 1)
        }
        for run, found in zip(wanted, assemble(sources, wanted, parts, came, [HOST] * len(wanted)), strict=True):
            expected = state_of(run).entries
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert found[key].dtype == value.dtype
                    assert found[key].shape == value.shape
                    assert torch.equal(found[key], value)
                else:
                    assert found[key] == value
    exact = torch.full((SIZES[2],), float("nan"))
    for copy in copies:
        assert exact_bytes(copy.manifest) == copy.exact.numel()
        for run, values in exact_runs(copy.manifest, copy.exact):
            exact[run.start : run.stop] = values
    assert torch.equal(exact, torch.arange(SIZES[2]) + 0.5)


def test_a_copy_uses_the_memory_of_an_old_one_and_follows_no_change() -> None:
    values = torch.zeros(10)
    old = pack((0, 0, 0), [RunState(ValueRun(0, 0, 10), {"m": values}, values)])
    values.fill_(1)
    assert not old.row.any()
    new = pack((0, 0, 0), [RunState(ValueRun(0, 0, 10), {"m": values}, values)], old)
    assert (new.row.data_ptr(), new.exact.data_ptr()) == (old.row.data_ptr(), old.exact.data_ptr())
    longer = pack((0, 0, 0), [RunState(ValueRun(0, 0, 10), {"m": values, "v": values})], old)
    assert longer.row.data_ptr() != old.row.data_ptr()


def test_values_that_no_shard_has_are_named() -> None:
    copy = pack((0, 0, 0), [RunState(ValueRun(0, 0, 10), {})])
    with pytest.raises(MismatchError, match=r"values 5 to 12 of parameter 0, the shards .* have 5"):
        plan_parts([Source(0, copy.manifest, copy)], [ValueRun(0, 5, 12)])


def test_replicas_are_on_other_machines_if_there_are_any() -> None:
    four = Topology(((0,), (1,), (2,), (3,)))
    assert [replica_ranks(four, rank, 1) for rank in range(4)] == [[1], [2], [3], [0]]
    assert replica_ranks(four, 3, 2) == [0, 1]
    pairs = Topology(((0, 1), (2, 3)))
    assert [replica_ranks(pairs, rank, 1) for rank in range(4)] == [[2], [3], [0], [1]]
    assert replica_ranks(pairs, 0, 2) == [2, 1]
    uneven = Topology(((0, 1, 2), (3,)))
    assert [replica_ranks(uneven, rank, 1) for rank in range(4)] == [[3], [3], [3], [0]]
    one = Topology(((0, 1, 2),))
    assert [replica_ranks(one, rank, 1) for rank in range(3)] == [[1], [2], [0]]
    assert replica_ranks(Topology(((0,),)), 0, 2) == []


def test_any_worker_of_a_ring_may_be_lost_and_two_neighbours_may_not() -> None:
    ring = Topology(tuple((rank,) for rank in range(4)))
    held = [
        [(0, number, 7) for number in range(4) if rank == number or rank in replica_ranks(ring, number, 1)]
        for rank in range(4)
    ]
    for gone in range(4):
        sources, lost = find_sources({0: Dealt(7, 4)}, [each for rank, each in enumerate(held) if rank != gone])
        assert len(sources) == 4
        assert not lost
        # Three workers send four shards.
        assert max([*sources.values()].count(rank) for rank in range(3)) <= 2
    assert find_sources({0: Dealt(7, 4)}, [held[0], held[2]])[1] == []
    assert find_sources({0: Dealt(7, 4)}, [held[0], held[3]])[1] == [(0, 1)]
    # Shards of another epoch are of other owners, and a model that is not spread needs none.
    assert find_sources({0: Dealt(8, 4)}, held)[1] == [(0, number) for number in range(4)]
    assert find_sources({}, held) == ({}, [])
