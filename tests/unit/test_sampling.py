import pytest
import torch
from torch import Tensor, nn

import poseidon
from poseidon.engine.discover import find_units
from poseidon.engine.sampling import plan, sample_loads
from poseidon.planning.cluster import Cluster, Link
from poseidon.units import Load

SLOW = Cluster(4, between=Link(1e7, 1e-6), flops=1e12)


class TwoTowers(nn.Module):
    """Calls one linear layer twice and looks up repeated indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 16)
        self.bag = nn.EmbeddingBag(1000, 16)
        self.shared = nn.Linear(16, 8)
        self.never = nn.Linear(8, 8)

    def forward(self, indices: Tensor, bags: Tensor) -> Tensor:
        left: Tensor = self.shared(self.table(indices))
        right: Tensor = self.shared(self.bag(bags))
        return left.sum() + right.sum()


def loads_of(model: nn.Module, inputs: object) -> dict[str, Load]:
    return sample_loads(model, find_units(model), inputs)


def test_rows_are_every_leading_dimension_of_the_input() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    assert loads_of(model, torch.zeros(3, 5, 6)) == {"0": Load(15), "2": Load(15)}
    assert loads_of(model, torch.zeros(6)) == {"0": Load(1), "2": Load(1)}


def test_calls_add_up_distinct_rows_count_and_unused_layers_have_no_load() -> None:
    indices, bags = torch.tensor([[1, 2, 2], [2, 7, 1]]), torch.tensor([[5, 5], [6, 5]])
    loads = loads_of(TwoTowers(), (indices, bags))
    assert loads == {"table": Load(3), "bag": Load(2, bags=2), "shared": Load(6 + 2)}


def test_inputs_may_be_named() -> None:
    inputs = {"bags": torch.tensor([[5, 5]]), "indices": torch.tensor([1, 2])}
    assert loads_of(TwoTowers(), inputs)["table"] == Load(2)


def test_on_the_meta_device_a_table_cannot_be_touched_in_more_rows_than_it_has() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)).to("meta")
    assert loads_of(model, torch.zeros(3, dtype=torch.long, device="meta"))["0"] == Load(3)
    assert loads_of(model, torch.zeros(4, 5, dtype=torch.long, device="meta"))["0"] == Load(10)


def test_factors_count_in_the_type_in_which_the_layer_computes() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert loads_of(model, torch.zeros(3, 6)) == {"0": Load(3, 2), "2": Load(3, 2)}
    assert loads_of(model.bfloat16(), torch.zeros(3, 6, dtype=torch.bfloat16)) == {"0": Load(3, 2), "2": Load(3, 2)}
    assert loads_of(model.double(), torch.zeros(3, 6, dtype=torch.float64)) == {"0": Load(3, 8), "2": Load(3, 8)}


def test_under_autocast_factors_pay_for_twice_the_batch() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    # With 4 machines factors win below 2 * 64 * 64 / (4 * 128) = 16 rows in float32, 32 in bfloat16.
    inputs = torch.zeros(24, 64)
    assert plan(model, inputs, SLOW).routes == {"0": "allreduce"}
    with torch.autocast("cpu", torch.bfloat16):
        assert plan(model, inputs, SLOW).routes == {"0": "factors"}


def test_the_model_is_left_as_it_was() -> None:
    model = TwoTowers()
    loads_of(model, (torch.tensor([1]), torch.tensor([[1]])))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_is_left_as_it_was_if_the_forward_fails() -> None:
    model = TwoTowers()
    with pytest.raises(TypeError, match="bags"):
        loads_of(model, torch.tensor([1]))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_plan_is_made_from_a_sample_batch() -> None:
    inputs = (torch.tensor([[1, 2, 2], [2, 7, 1]]), torch.tensor([[5, 5], [6, 5]]))
    assert plan(TwoTowers(), inputs, SLOW).routes == {
        "table": "rows",
        "bag": "rows",
        "shared": "allreduce",
        "never": "allreduce",
    }
    assert plan(TwoTowers(), inputs, SLOW, {"shared": "factors"}).routes["shared"] == "factors"


def test_a_convolutional_net_sends_its_head_as_factors() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 256), nn.Linear(256, 10))
    made = poseidon.plan(model, torch.zeros(4, 3, 8, 8), SLOW)
    assert isinstance(made, poseidon.Plan)
    assert made.routes == {"0": "allreduce", "2": "factors", "3": "factors"}
    assert made.wire_bytes < made.allreduce_bytes


def test_a_tied_table_counts_touched_rows_and_the_linear_layers_rows() -> None:
    table, head = nn.Embedding(50, 4), nn.Linear(4, 50, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    assert loads_of(model, torch.tensor([[1, 2, 2], [3, 1, 1]])) == {"0": Load(6, 4, 3)}
    with torch.autocast("cpu", torch.bfloat16):
        assert loads_of(model, torch.tensor([7, 7])) == {"0": Load(2, 2, 1)}
