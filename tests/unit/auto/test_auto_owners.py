from __future__ import annotations

import copy
import sys

import torch
from torch import nn

from poseidon.auto.front_ends import GradientOwner
from poseidon.auto.output import Tail
from poseidon.auto.owners import Census, find_holding, find_roots
from poseidon.engine.outputs import find_leaves
from poseidon.following.naming import find_name
from poseidon.following.patches import Patches


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(2, 3)
        self.right = nn.Linear(3, 2)


def test_parameters_are_found_in_their_outermost_module() -> None:
    patches, census = Patches(), Census()
    earlier = nn.Linear(1, 1)
    census.install(patches)
    pair, other = Pair(), nn.Linear(2, 2)
    kept = copy.deepcopy(pair)
    patches.undo()
    assert find_roots([*other.parameters(), *pair.parameters()], census.living()) == [other, pair]
    assert find_roots(list(kept.left.parameters()), census.living()) == [kept]
    assert find_roots([earlier.bias], census.living()) == [earlier]


def test_an_optimizer_of_one_part_holds_that_part_only() -> None:
    pair = Pair()
    holding = find_holding(list(pair.left.parameters()), [pair, *pair.children()])
    assert holding.roots == (pair,)
    assert [unit.name for unit in holding.units] == ["Pair.left"]
    assert [name for name, _ in holding.named()] == ["Pair.left.weight", "Pair.left.bias"]
    assert holding.units[0].spec.kind == "linear"


def test_modules_of_one_class_and_loose_tensors_have_names_of_their_own() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    loose = torch.zeros(3, requires_grad=True)
    holding = find_holding([*one.parameters(), *two.parameters(), loose], [two, one])
    assert [unit.name for unit in holding.units] == ["Linear1.(root)", "Linear2.(root)", "tensor0"]
    assert [unit.index for unit in holding.units] == [0, 1, 2]
    assert holding.describe() == "Linear, Linear, 1 tensors, 15 parameters"


def test_leaves_are_what_a_backward_will_reach() -> None:
    w, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    layer = nn.Linear(2, 1)
    loss = layer(torch.ones(1, 2) * w).sum() + (unused.detach() * w).sum()
    found = find_leaves([loss])
    assert {id(leaf) for leaf in found} == {id(w), id(layer.weight), id(layer.bias)}


def test_the_outermost_name_is_found() -> None:
    train_things = object()

    def inside(things: object) -> str | None:
        return find_name(things)

    assert inside(train_things) == "train_things"
    unnamed = find_name(object())
    assert unnamed is None


def test_a_tail_keeps_the_last_state_of_a_progress_bar() -> None:
    tail = Tail()
    print("start", file=tail)
    for percent in range(0, 101, 50):
        print(f"\r{percent}%", end="", file=tail)
    assert tail.last_lines() == ["start", "100%"]
    for number in range(30):
        print(number, file=tail)
    assert tail.last_lines()[-1] == "29"
    assert len(tail.last_lines()) == 20
    assert sys.stdout is not tail


def test_a_parameter_that_gets_the_memory_of_a_freed_one_is_a_stranger() -> None:
    held = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    owner = GradientOwner("SGD", lambda: held)
    owner.learn(held[:2])
    assert owner.strangers() == held[2:]
    numbers = {id(parameter) for parameter in held[:2]}
    del held[:2]
    # New ones take the places of the freed ones sooner or later.
    held += [nn.Parameter(torch.zeros(2)) for _ in range(100)]
    assert numbers & set(map(id, held))
    assert len(owner.strangers()) == len(held)
