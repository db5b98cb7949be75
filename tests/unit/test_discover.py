import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from poseidon.engine.discover import ROOT, find_units, tensors_of
from poseidon.errors import UnsupportedError
from poseidon.units import ParameterSpec


def kinds(model: nn.Module) -> dict[str, str]:
    return {unit.name: unit.spec.kind for unit in find_units(model)}


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.fc = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)


def test_each_module_with_parameters_is_a_unit_in_the_models_order() -> None:
    units = find_units(Root())
    assert [(unit.index, unit.name, unit.spec.kind) for unit in units] == [
        (0, ROOT, "dense"),
        (1, "fc", "linear"),
        (2, "norm", "dense"),
    ]
    assert units[1].spec.parameters == (ParameterSpec("fc.weight", (2, 3), 4), ParameterSpec("fc.bias", (2,), 4))
    assert units[0].spec.parameters == (ParameterSpec("scale", (3,), 4),)


def test_live_units_hold_the_models_own_tensors() -> None:
    model = Root()
    unit = find_units(model)[1]
    assert unit.module is model.fc
    assert unit.weight is model.fc.weight
    assert unit.parameters[1] is model.fc.bias


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_element_sizes_are_the_parameters(dtype: torch.dtype) -> None:
    (unit,) = find_units(nn.Linear(4, 4).to(dtype))
    assert unit.spec.size_bytes == 20 * dtype.itemsize


class OtherLinear(nn.Linear):
    """May use its weight in ways that nobody knows of."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        return super().forward(input) + self.weight.sum()


class OtherEmbedding(nn.Embedding):
    pass


def linear_with_gain() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.register_parameter("gain", nn.Parameter(torch.ones(1)))
    return layer


def parametrized() -> nn.Module:
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(3, 2), "linear"),
        (nn.Linear(3, 2, bias=False), "linear"),
        (nn.Embedding(5, 2), "embedding"),
        (nn.EmbeddingBag(5, 2, mode="mean"), "embedding"),
        (nn.EmbeddingBag(5, 2, mode="sum"), "embedding"),
        (nn.EmbeddingBag(5, 2, mode="max"), "dense"),
        (nn.Embedding(5, 2, scale_grad_by_freq=True), "dense"),
        (nn.EmbeddingBag(5, 2, scale_grad_by_freq=True), "dense"),
        (nn.Conv2d(3, 2, 1), "dense"),
        (nn.LayerNorm(3), "dense"),
        (nn.Bilinear(2, 2, 2), "dense"),
        (OtherLinear(3, 2), "dense"),
        (OtherEmbedding(5, 2), "dense"),
        (linear_with_gain(), "dense"),
        (parametrized(), "dense"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_only_layers_whose_gradient_is_known_have_a_short_form(module: nn.Module, kind: str) -> None:
    found = set(kinds(nn.Sequential(module)).values())
    assert found == {kind}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7)
        self.head.weight = self.table.weight


def test_a_shared_parameter_belongs_to_its_first_module_and_is_dense() -> None:
    table, head = find_units(Tied())
    assert (table.name, table.spec.kind) == ("table", "dense")
    assert [spec.name for spec in table.spec.parameters] == ["table.weight"]
    assert (head.name, head.spec.kind) == ("head", "dense")
    assert [spec.name for spec in head.spec.parameters] == ["head.bias"]


def test_a_shared_module_is_one_unit_and_keeps_its_kind() -> None:
    layer = nn.Linear(3, 3)
    assert kinds(nn.Sequential(layer, nn.ReLU(), layer)) == {"0": "linear"}


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    model[1].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    units = {unit.name: unit.spec for unit in find_units(model)}
    assert sorted(units) == ["1", "2", "3"]
    assert units["1"].kind == "dense", "a bias alone has no factors"
    assert units["2"].kind == "linear"
    assert len(units["2"].parameters) == 1


def test_ignored_parameters_are_left_out() -> None:
    model = Root()
    units = {unit.name: unit.spec for unit in find_units(model, {"fc.weight", "scale"})}
    assert [spec.name for spec in units["fc"].parameters] == ["fc.bias"]
    assert ROOT not in units


@pytest.mark.parametrize("module", [nn.Embedding(9, 2, sparse=True), nn.EmbeddingBag(9, 2, sparse=True)])
def test_sparse_tables_are_marked(module: nn.Module) -> None:
    (unit,) = find_units(module)
    assert unit.spec.is_sparse
    assert unit.spec.kind == "embedding"


def test_a_shared_sparse_table_stays_sparse() -> None:
    model = Tied()
    model.table.sparse = True
    table, _ = find_units(model)
    assert table.spec.is_sparse
    assert table.spec.kind == "embedding"


def test_lazy_modules_must_run_once_before() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UnsupportedError, match=r"0\.weight has no shape yet .* run one batch"):
        find_units(model)
    model(torch.zeros(2, 5))
    assert kinds(model) == {"0": "linear"}


def test_a_model_without_parameters_has_no_units() -> None:
    assert find_units(nn.Sequential(nn.ReLU(), nn.Flatten())) == []


def test_replicas_share_frozen_parameters_and_buffers_too_each_once() -> None:
    model = Root()
    model.fc.weight.requires_grad_(False)
    pointers = [tensor.data_ptr() for tensor in tensors_of(model)]
    expected = [*model.parameters(), *model.buffers()]
    assert pointers == [tensor.data_ptr() for tensor in expected]
    assert len(tensors_of(model, with_buffers=False)) == len([*model.parameters()])
    assert len(tensors_of(model, {"norm.running_mean", "scale"})) == len(expected) - 2
    assert len(tensors_of(Tied())) == 2
    assert not any(tensor.requires_grad for tensor in tensors_of(model))


def test_the_names_of_units_do_not_tell_whether_a_model_is_compiled() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1] = torch.compile(model[1], backend="eager")
    assert kinds(model) == kinds(torch.compile(model, backend="eager")) == {"0": "linear", "1": "linear"}
    assert kinds(torch.compile(nn.Linear(3, 2), backend="eager")) == {ROOT: "linear"}


def test_a_model_compiled_as_one_graph_has_no_short_forms() -> None:
    model = nn.Sequential(nn.Linear(3, 2), torch.compile(nn.Linear(2, 2), backend="eager", fullgraph=True))
    assert kinds(model) == {"0": "linear", "1": "dense"}


def _tied(head: nn.Linear, table: nn.Embedding) -> nn.Module:
    head.weight = table.weight
    return nn.ModuleDict({"table": table, "head": head})


def test_a_table_that_is_a_linear_layers_weight_too_is_one_tied_unit() -> None:
    table, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    (unit,) = find_units(_tied(head, table))
    assert (unit.name, unit.spec.kind, unit.parameters) == ("table", "tied", (table.weight,))
    assert (unit.module, unit.head) == (table, head)
    (unit,) = find_units(nn.ModuleList([head, table]))
    assert (unit.name, unit.module, unit.head) == ("0", table, head)


class OwnLinear(nn.Linear):
    """May use its weight in any way."""


@pytest.mark.parametrize(
    ("table", "head"),
    [
        (nn.Embedding(9, 4), nn.Linear(4, 9)),
        (nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Linear(4, 9, bias=False)),
        (nn.Embedding(9, 4), OwnLinear(4, 9, bias=False)),
    ],
)
def test_other_pairs_with_one_weight_are_dense(table: nn.Embedding, head: nn.Linear) -> None:
    assert kinds(_tied(head, table))["table"] == "dense"


def test_a_table_with_three_users_is_dense() -> None:
    model = _tied(nn.Linear(4, 9, bias=False), nn.Embedding(9, 4))
    model["again"] = nn.Linear(4, 9, bias=False)
    model["again"].weight = model["table"].weight
    assert kinds(model) == {"table": "dense"}


class Conv(nn.Module):
    """Has the parameters of transformers' Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 9))
        self.bias = nn.Parameter(torch.zeros(9))


def test_transformers_own_linear_layer_is_known_by_its_full_name_alone() -> None:
    (unit,) = find_units(Conv())
    assert (unit.spec.kind, unit.is_transposed) == ("dense", False)
    kind = type("Conv1D", (Conv,), {"__module__": "transformers.pytorch_utils"})
    (unit,) = find_units(kind())
    assert (unit.spec.kind, unit.is_transposed) == ("linear", True)


def test_looking_for_units_does_not_advance_a_spectral_norm() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    before = [buffer.clone() for buffer in layer.buffers()]
    assert {unit.spec.kind for unit in find_units(layer)} == {"dense"}
    assert all(torch.equal(buffer, old) for buffer, old in zip(layer.buffers(), before, strict=True))
