"""Poseidon in the place of torch's class: programs that wrap the model themselves, with the real Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from auto_runs import SLOW
from poseidon.planning.cluster import Cluster
from ranks import run_ranks

pytest.importorskip("accelerate", reason="Accelerate is not installed (the extra `trainers`)")


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it, as LoRA has them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 32).requires_grad_(False)
        self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 32, bias=False)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


def points(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(precision: str) -> tuple[Any, list[float], Any]:
    """Train with Accelerate as its documentation shows: accumulation, clipping, evaluation, the model unwrapped."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    torch.manual_seed(0)
    plain = Adapted()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
    loaders = DataLoader(points(44, 1), 5), DataLoader(points(22, 2), 4)  # neither divides evenly
    model, optimizer, train_loader, loader = accelerator.prepare(plain, optimizer, *loaders)
    losses = []
    for _ in range(2):
        for x, y in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            parts = [accelerator.gather_for_metrics((model(x), y)) for x, y in loader]
        assert sum(len(y) for _, y in parts) == 22
        losses.append(sum(cross_entropy(out, y, reduction="sum").item() for out, y in parts) / 22)
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is plain
    return model, losses, {name: value.clone() for name, value in plain.state_dict().items()}


def train_both_ways() -> list[Any]:
    import poseidon
    from poseidon.trainers import in_place

    theirs = {precision: train(precision)[1:] for precision in ("no", "bf16")}
    in_place.replace()
    found = []
    for precision, expected in theirs.items():
        model, *ours = train(precision)
        assert isinstance(model, poseidon.DistributedDataParallel)
        travels = [unit.name for unit in model._engine.units]
        found.append((precision, expected, ours, travels))
        model.close()
    assert in_place.wrapped == ["Adapted, 187 of 603 parameters"] * 2
    in_place.check(is_asked=True)
    return found


@pytest.mark.timeout(300)
def test_accelerate_does_what_it_does_with_ddp(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.json"
    Cluster(machines=2, between=SLOW, inside=SLOW).save(cluster)
    env = {"MASTER_PORT": "1", "POSEIDON_CLUSTER": str(cluster)}
    first, second = run_ranks(train_both_ways, 2, timeout_s=280, env=env, preload=("accelerate",))
    for one, other in zip(first, second, strict=True):
        precision, (their_losses, theirs), (losses, ours), travels = one
        assert travels == ["down", "up", "head"]
        limit = {"rtol": 2e-2, "atol": 2e-2} if precision == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(losses, their_losses, **limit)
        torch.testing.assert_close(ours, theirs, **limit)
        torch.testing.assert_close(ours, other[2][1], rtol=0, atol=0)
