"""``update="server"`` in elastic jobs: what owners keep is copied to others, and other owners go on with the same bits.

``test_elastic.py`` kills workers; here everything happens among the same two, so that additions keep their order.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import poseidon
import twins
from poseidon.checkpoints.memory import Kept, copy_over
from poseidon.checkpoints.replicas import Replicator, find_sources, hand_on, sharded_members
from poseidon.errors import UnsupportedError
from poseidon.team.epochs import live_on
from poseidon.team.team import Team
from ranks import run_ranks

STEPS = 6


class _TiedNet(nn.Module):
    """Under autocast, linear weights travel rounded, and of the table, which is the head too, rows are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 48)
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 190)
        self.down = nn.Linear(190, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.linear(x, self.table.weight)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    tokens = torch.randint(0, 50, (2, 9), generator=twins.seed_of_rank(number))
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if number != STEPS // 2:  # the first one after the change is left out, as a GradScaler does
        optimizer.step()


def _make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = _TiedNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, _ = poseidon.distribute(net, optimizer, cluster=twins.slow_cluster(), update="server")
    live_on(model)
    return model, optimizer


def _everything(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = [value.clone() for value in model.module.state_dict().values()]
    for _, entry in sorted(optimizer.state_dict()["state"].items()):
        found += [value.clone() for value in entry.values()]
    return found


def _go_on_without_a_shard() -> None:
    twins.quiet()
    model, optimizer = _make(5)
    for number in range(STEPS):
        _step(model, optimizer, number)
    undisturbed = _everything(model, optimizer)
    model.close()
    del model, optimizer

    gc.collect()
    team, replicator = Team(None), Replicator(1)
    model, optimizer = _make(5)
    for number in range(STEPS // 2):
        _step(model, optimizer, number)
        model.finish_step()
        staged = replicator.stage(team, 0, number + 1, None)
    ((_, part),) = sharded_members().items()
    with part.as_is():
        weights = copy_over(model.module.state_dict(), None)
        options = copy_over(optimizer.state_dict(), None)
    assert not options["state"]
    # Weights of linear layers and of the table are here rounded only.
    assert not (weights["up.weight"].view(torch.int32) & 0xFFFF).any()
    assert (weights["norm.weight"].view(torch.int32) & 0xFFFF).any()
    mine, other = staged.shards
    assert (mine.number, other.number) == (team.rank, 1 - team.rank)
    parts = [sum(copy.size for copy in staged.shards if copy.number == number) for number in (0, 1)]
    # Two values of state for each, and those weights.
    values = sum(p.numel() for p in model.module.parameters())
    assert sum(parts) > 4 * 2.9 * values
    assert max(parts) < 0.6 * sum(parts)
    model.close()
    del model, optimizer, part

    gc.collect()
    model, optimizer = _make(6)  # with other weights
    model.load_state_dict({f"module.{name}": value for name, value in weights.items()})
    optimizer.load_state_dict(options)
    held = staged.shards if team.rank == 0 else []  # rank 1 was lost, and what comes in its place has nothing
    everybody = [[(copy.member, copy.number, copy.epoch) for copy in staged.shards], []]
    sources, lost = find_sources(staged.dealt, everybody)
    assert set(sources.values()) == {0}
    assert not lost
    hand_on(team, sources, held)
    with pytest.raises(UnsupportedError, match="looked at the optimizer's state after workers were lost"):
        optimizer.state_dict()
    kept = Kept(STEPS // 2, {}, {}, {}, held, staged.dealt)
    assert replicator.stage(team, 1, STEPS // 2, kept).shards == held  # nobody has taken it yet
    for number in range(STEPS // 2, STEPS):
        _step(model, optimizer, number)
        model.finish_step()
        again = replicator.stage(team, 1, number + 1, kept)
        assert [copy.number for copy in again.shards] == [team.rank, 1 - team.rank]
    for ours, theirs in zip(_everything(model, optimizer), undisturbed, strict=True):
        assert torch.equal(ours, theirs)
    model.close()
    team.close()


def test_other_owners_go_on_from_replicas_with_the_same_bits() -> None:
    run_ranks(_go_on_without_a_shard, 2)
