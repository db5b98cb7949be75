import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from poseidon.engine.outputs import map_tensors, move_to, tensors_in, unreached


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Result:
    loss: Any
    extra: Any


TENSORS = st.integers(0, 999).map(lambda number: torch.tensor(float(number)))
LEAVES = st.one_of(TENSORS, st.none(), st.integers(), st.just("text"))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    )


NESTED = st.recursive(LEAVES, containers, max_leaves=10)


@settings(max_examples=50)
@given(NESTED)
def test_mapping_changes_every_tensor_and_keeps_the_shape_of_things(value: Any) -> None:
    before = [float(tensor) for tensor in tensors_in(value)]
    changed = map_tensors(value, lambda tensor: tensor + 1)
    assert [float(tensor) for tensor in tensors_in(changed)] == [number + 1 for number in before]
    assert [float(tensor) for tensor in tensors_in(value)] == before, "the original must stay as it was"
    assert type(changed) is type(value)
    back = map_tensors(changed, lambda tensor: tensor - 1)
    assert repr(back) == repr(value)


def test_tensors_are_found_wherever_they_hide() -> None:
    one, two, three, four, five = torch.arange(5.0).unbind()
    value = {"a": [one, (two,)], "b": Result(three, {"c": Pair(four, "text")}), "d": {five}, "e": None, "f": Result}
    assert [float(tensor) for tensor in tensors_in(value)] == [0, 1, 2, 3, 4]
    assert list(tensors_in(object())) == []
    assert list(tensors_in(one)) == [one]


def test_other_objects_are_passed_on_untouched() -> None:
    result = Result(torch.zeros(1), None)
    assert map_tensors([result], lambda tensor: tensor + 1)[0] is result


def test_dictionaries_of_other_kinds_stay_what_they_are() -> None:
    ordered = collections.OrderedDict(a=torch.zeros(1), b="text")
    defaults = collections.defaultdict(list, c=[torch.zeros(1)])
    changed = map_tensors((ordered, defaults), lambda tensor: tensor + 1)
    assert [type(one) for one in changed] == [collections.OrderedDict, collections.defaultdict]
    assert (float(changed[0]["a"]), changed[0]["b"], float(changed[1]["c"][0])) == (1.0, "text", 1.0)
    assert changed[1]["d"] == []
    assert float(ordered["a"]) == 0.0


def test_the_lengths_of_a_packed_sequence_stay_on_the_cpu() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    moved = map_tensors([packed], move_to(torch.device("meta")))[0]
    assert (moved.data.is_meta, moved.sorted_indices.is_meta, moved.batch_sizes.device.type) == (True, True, "cpu")


def test_moving_goes_to_the_device() -> None:
    assert move_to(torch.device("meta"))(torch.zeros(3)).is_meta


class Branches(nn.Module):
    """Two branches of which a call may take either, both, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor, branches: str) -> list[Tensor]:
        trunk = self.trunk(x)
        return [trunk, *(getattr(self, name)(trunk.relu()) for name in branches.split())]


def unreached_names(model: nn.Module, outputs: list[Tensor]) -> set[str]:
    missing = {id(parameter) for parameter in unreached(outputs, model.parameters())}
    return {name.split(".")[0] for name, parameter in model.named_parameters() if id(parameter) in missing}


@pytest.mark.parametrize(
    ("branches", "missing"), [("", {"left", "right"}), ("left", {"right"}), ("right", {"left"}), ("left right", set())]
)
def test_parameters_of_branches_not_taken_are_unreached(branches: str, missing: set[str]) -> None:
    model = Branches()
    assert unreached_names(model, model(torch.zeros(2, 4), branches)) == missing


def test_an_output_counts_even_if_it_is_not_the_first() -> None:
    model = Branches()
    outputs = model(torch.zeros(2, 4), "left right")
    assert unreached_names(model, outputs[:1]) == {"left", "right"}
    assert unreached_names(model, outputs[1:2]) == {"right"}
    assert unreached_names(model, []) == {"trunk", "left", "right"}


PATHS: dict[str, Callable[[Branches, Tensor], Tensor]] = {
    "detached": lambda model, x: model.left(model.trunk(x).detach()),
    "used twice": lambda model, x: model.left(model.left(model.trunk(x))) + model.right(x),
    "frozen input": lambda model, x: model.right(x),
    "no gradient": lambda model, x: model.trunk(x).detach(),
    "parameter itself": lambda model, _: model.left.weight,
    "view of a parameter": lambda model, _: model.left.weight[0],
}


@pytest.mark.parametrize("path", PATHS)
def test_unreached_agrees_with_what_autograd_leaves_without_gradient(path: str) -> None:
    model = Branches()
    output = PATHS[path](model, torch.zeros(2, 4))
    found = unreached([output], model.parameters())
    if output.requires_grad:
        output.sum().backward()
    without = [id(parameter) for parameter in model.parameters() if parameter.grad is None]
    assert [id(parameter) for parameter in found] == without


def test_a_very_deep_graph_is_walked_without_recursion() -> None:
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    x: Tensor = weight
    for _ in range(5000):
        x = x + 1
    assert unreached([x], [weight, other]) == [other]
