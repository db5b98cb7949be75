"""What counts as loaded into a model whose workers drift apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from poseidon.engine.loads import Loads


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    net[1].weight = net[0].weight
    return net


def _twice() -> nn.Module:
    layer = nn.Linear(3, 3, bias=False)
    return nn.Sequential(layer, nn.Tanh(), layer)


@pytest.mark.parametrize("make", [_tied, _twice])
def test_a_weight_with_two_names_is_loaded_once_by_one_load(make: object) -> None:
    net = make()  # type: ignore[operator]
    loads = Loads(net)
    own = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(own)
    assert loads.take() == {id(net[0].weight)}, "values that are this worker's own are the others' news"
    for values in ({name: torch.ones_like(value) for name, value in own.items()}, own):
        net.load_state_dict(values)
    assert not loads.take(), "an evaluation"
    net.load_state_dict(own)
    net[0].load_state_dict({"weight": own["0.weight"]})
    assert not loads.take(), "a second load, of a part"
    loads.close()
