"""Lightning's Trainer and Fabric with ``strategy="poseidon"``: the real library, two workers on loopback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from auto_runs import SLOW
from poseidon.planning.cluster import Cluster
from ranks import run_ranks

pytest.importorskip("lightning", reason="Lightning is not installed (the extra `trainers`)")

ROWS, BATCH = 40, 4


def data(seed: int = 1) -> TensorDataset:
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, momentum=None), nn.Tanh(), nn.Linear(16, 1))


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def fit(strategy: Any, folder: Path, is_manual: bool = False, **options: Any) -> tuple[Any, Any]:
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net() if is_manual else net()
            self.automatic_optimization = not is_manual
            self.seen: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            self.seen += batch[1].flatten().tolist()
            loss = mse_loss(self.net(batch[0]), batch[1])
            if is_manual:
                optimizer = self.optimizers()
                for scale in (1.0, 0.5):  # two backwards in one forward
                    optimizer.zero_grad()
                    self.manual_backward(mse_loss(self.net(batch[0]), batch[1]) * scale)
                    optimizer.step()
                return None
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    model = Regression()
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        enable_checkpointing=not is_manual,
        default_root_dir=folder,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, DataLoader(data(), BATCH), DataLoader(data(2), BATCH))
    return model, trainer


MATRIX: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "bf16": {"precision": "bf16-mixed"},
    "manual": {"is_manual": True},
}


def tolerance(name: str) -> dict[str, float]:
    """Return how far two ways may be apart: DDP rounds each worker's gradient to bf16, the factors' route does not."""
    return {"rtol": 2e-2, "atol": 2e-2} if name == "bf16" else {"rtol": 1e-5, "atol": 1e-6}


def train_both_ways(folder: str) -> dict[str, Any]:
    import poseidon.trainers.lightning  # noqa: F401 - registers the strategy

    place = dict(os.environ)
    found: dict[str, Any] = {}
    for name, options in MATRIX.items():
        ours, trainer = fit("poseidon", Path(folder) / name / "ours", **options)
        assert (trainer.world_size, trainer.global_rank) == (2, int(os.environ["RANK"]))
        theirs, other = fit("ddp", Path(folder) / name / "theirs", devices=2, **options)
        os.environ.update(place)  # of which Lightning's own launcher removes a part at its end
        found[name] = (ours.state_dict(), theirs.state_dict(), ours.seen, theirs.seen)
        assert trainer.global_step == other.global_step
        metrics = [one.callback_metrics["val"] for one in (trainer, other)]
        torch.testing.assert_close(*metrics, **tolerance(name))
    saved = torch.load(next((Path(folder) / "accumulated" / "ours").rglob("*.ckpt")), weights_only=False)
    found["saved"] = saved["state_dict"]
    return found


def in_ranks(function: Any, folder: Path) -> list[Any]:
    cluster = folder / "cluster.json"
    Cluster(machines=2, between=SLOW, inside=SLOW).save(cluster)
    env = {"MASTER_PORT": "1", "POSEIDON_CLUSTER": str(cluster)}
    return run_ranks(function, 2, str(folder), timeout_s=280, env=env, preload=("lightning.pytorch",))


@pytest.mark.timeout(300)  # six trainings, each with all of Lightning around it
def test_the_trainer_does_what_it_does_with_ddp(tmp_path: Path) -> None:
    first, second = in_ranks(train_both_ways, tmp_path)
    for name in MATRIX:
        for rank in (first, second):
            ours, theirs, seen, also_seen = rank[name]
            torch.testing.assert_close(ours, theirs, **tolerance(name), msg=lambda text, name=name: f"{name}: {text}")
            assert seen == also_seen
        torch.testing.assert_close(first[name][0], second[name][0], rtol=0, atol=0)
    epochs = [rank["accumulated"][2][: ROWS // 2] for rank in (first, second)]
    assert sorted(epochs[0] + epochs[1]) == sorted(data().tensors[1].flatten().tolist()), "not every sample once"
    torch.testing.assert_close(first["saved"], first["accumulated"][0], rtol=0, atol=0)


def train_by_hand_in_place(folder: str) -> list[tuple[Any, Any]]:
    from lightning.pytorch.strategies import DDPStrategy

    from poseidon.trainers.in_place import StandIn, replace

    place = dict(os.environ)
    found: list[list[Any]] = []
    for whose in ("theirs", "ours"):
        if whose == "ours":
            replace()
        found.append([])
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            wrapped: list[Any] = []

            class Watched(DDPStrategy):
                def pre_backward(self, loss: Any, seen: list[Any] = wrapped) -> None:
                    seen.append(self.model)
                    super().pre_backward(loss)

            model, _ = fit(Watched(**options), Path(folder) / whose, is_manual=True, devices=2)
            os.environ.update(place)
            assert len(wrapped) == 10
            assert all(isinstance(one, StandIn) is (whose == "ours") for one in wrapped)
            found[-1].append(model.state_dict())
    return list(zip(*found, strict=True))


@pytest.mark.timeout(300)
def test_manual_optimization_with_lightnings_own_strategy_does_what_it_does_with_torchs_class(tmp_path: Path) -> None:
    ranks = in_ranks(train_by_hand_in_place, tmp_path)
    for first, second in zip(*ranks, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(*first)


def train_with_fabric(folder: str) -> Any:
    from lightning.fabric import Fabric
    from torch.utils.data import DistributedSampler

    import poseidon
    import poseidon.trainers.lightning

    fabric = Fabric(strategy="poseidon", accelerator="cpu")
    fabric.launch()
    plain = small_net()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(DataLoader(data(), BATCH))
    assert isinstance(loader.sampler, DistributedSampler)
    for number, (x, y) in enumerate(loader):
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(mse_loss(model(x), y) / 2)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(Path(folder) / "fabric.ckpt", {"model": model})
    assert isinstance(model._forward_module, poseidon.DistributedDataParallel)
    return {name: value.clone() for name, value in plain.state_dict().items()}


def test_fabric_accumulates_and_saves_as_one_process_does(tmp_path: Path) -> None:
    states = in_ranks(train_with_fabric, tmp_path)
    alone = small_net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    x, y = data().tensors
    # Each worker takes every second sample, four at a time; two such batches make a step.
    for start in range(0, ROWS // 16 * 16, 16):
        optimizer.zero_grad()
        mse_loss(alone(x[start : start + 16]), y[start : start + 16]).backward()
        optimizer.step()
    for state in states:
        torch.testing.assert_close(state, alone.state_dict())
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)
    saved = torch.load(tmp_path / "fabric.ckpt", weights_only=False)["model"]
    torch.testing.assert_close(saved, states[0], rtol=0, atol=0)
