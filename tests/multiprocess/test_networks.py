"""Every network of the zoo trains to what torch's DistributedDataParallel gives on 2 workers, and some on 4."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nightly import amount
from poseidon import zoo
from ranks import run_ranks
from twins import compare_twins


def _train_network(name: str) -> dict[str, str]:
    network = zoo.build(name, tiny=True, dropout=0.0)
    # Double precision: tiny networks with BatchNorm on 4 samples turn the last float bits into percents, and what is
    # compared here is the exchange, not their conditioning; for the same reason the learning rate is small. Tokens and
    # table indices stay whole numbers.
    state = {key: value.clone() for key, value in network.model.double().state_dict().items()}

    def make() -> nn.Module:
        network.model.load_state_dict(state)
        network.model.zero_grad()
        return network.model

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        inputs, targets = network.batch(4, seed=100 * number + dist.get_rank())
        inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        targets = targets.double() if targets.is_floating_point() else targets
        optimizer.zero_grad()
        network.loss(model(*inputs), targets).backward()
        optimizer.step()

    return compare_twins(make, step, steps=5, rtol=1e-5, atol=1e-8, lr=RATE.get(name, 1e-4))


# The two Inceptions double a difference several times per step at the usual rate, even one of the last bit of a double.
RATE = {"googlenet": 1e-7, "inception-v3": 1e-7}

EXPECTED_ROUTE = {
    "alexnet": "factors",
    "vgg19": "factors",
    "vgg19-22k": "factors",
    "dlrm": "rows",
}


ON_FOUR = amount(["alexnet", "resnet18", "gpt2", "dlrm"], zoo.names())


@pytest.mark.parametrize(("name", "workers"), [*((name, 2) for name in zoo.names()), *((name, 4) for name in ON_FOUR)])
def test_network_trains_as_under_torch(name: str, workers: int) -> None:
    routes = run_ranks(_train_network, workers, name, timeout_s=110)[0]
    assert routes, "the engine made no plan"
    if name in EXPECTED_ROUTE:
        assert EXPECTED_ROUTE[name] in routes.values()
