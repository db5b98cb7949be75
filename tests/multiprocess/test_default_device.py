"""A script's default device is for the script: what Poseidon makes names its own.

The default is ``meta``, whose tensors have no values, so that whatever forgets to name a device fails. Scripts set
``cuda``; there, memory that has to be the host's was asked for on the device.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import poseidon
from poseidon.data import ElasticSampler
from ranks import run_ranks

SOURCES = Path(poseidon.__file__).parent
PROGRAMS = {"caffe", "cli", "lab", "zoo"}
"""Rooms whose code runs in programs of their own."""
MAKERS = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
MAKERS |= {"empty_strided", "tensor", "zeros"}

MODES: dict[str, dict[str, Any] | None] = {
    "wrapper": None,
    "distribute": {},
    "factors": {"routes": {"*": "factors"}},
    "clipped": {"max_grad_norm": 1.0},
    "server": {"update": "server"},
    "server, clipped": {"update": "server", "max_grad_norm": 1.0},
    "int8": {"lossy": "int8"},
    "topk": {"lossy": "topk"},
    "lowrank": {"lossy": "lowrank"},
    "local": {"consistency": "local", "sync_every": 2},
    "local, int8": {"consistency": "local", "sync_every": 2, "compress": "int8"},
    "ssp": {"consistency": "ssp", "staleness": 1},
}


def _train(mode: str, folder: str, first: int, last: int) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Embedding(40, 16), nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    options, words = MODES[mode], torch.arange(24).view(6, 4)
    classes = torch.arange(6) % 4
    torch.set_default_device("meta")
    model: Any
    if options is None:
        model = poseidon.DistributedDataParallel(net)
    else:
        model, optimizer = poseidon.distribute(net, optimizer, **options)
    kept: Any = poseidon.Checkpoint(folder, every=3, model=model, optimizer=optimizer)
    with kept as checkpoint:
        begun = checkpoint.resume()
        assert begun == first
        for step in range(begun, last):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(words + dist.get_rank()), classes)
            loss.backward()
            optimizer.step()
            checkpoint.step(step + 1)
    assert loss.isfinite().item()
    assert all(value.device.type == "cpu" for value in net.state_dict().values())
    if options is None or "consistency" not in options:
        model.verify_replicas()
    assert sum(map(len, ElasticSampler(range(10), 4))) == 5
    model.close()


@pytest.mark.parametrize("mode", list(MODES))
def test_training_and_saving_under_a_default_device(mode: str, tmp_path: Path) -> None:
    run_ranks(_train, 2, mode, str(tmp_path), 0, 4)
    run_ranks(_train, 2, mode, str(tmp_path), 3, 6)


def _unnamed(path: Path) -> list[str]:
    """Return the calls that make a tensor wherever the default device is."""
    return [
        f"{path.relative_to(SOURCES)}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}
        and all(word.arg != "device" for word in node.keywords)
    ]


def test_what_makes_a_tensor_says_where() -> None:
    paths = [path for path in SOURCES.rglob("*.py") if path.relative_to(SOURCES).parts[0] not in PROGRAMS]
    assert len(paths) > 100
    assert [call for path in paths for call in _unnamed(path)] == []
