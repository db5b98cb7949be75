import itertools
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

from poseidon.errors import MismatchError
from poseidon.team.agree import Description, check_same_model, describe, first_difference
from poseidon.team.team import Team
from poseidon.team.verify import check_same_bits


class Room:
    """Stands for a team of three: keeps what this worker says and answers with what all are to have said."""

    class _Watch:
        hosts = ("ape", "bee", "cat")

    watch = _Watch()

    def __init__(self, numbers: list[list[int]] | None = None, words: list[Any] | None = None) -> None:
        self.heard: list[Sequence[int]] = []
        self._numbers = numbers
        self._words = words

    def gather_ints(self, values: Sequence[int], _what: str) -> list[list[int]]:
        self.heard.append(values)
        return [list(values)] * 3 if self._numbers is None else self._numbers

    def gather_json(self, value: Any) -> list[Any]:
        assert self._words is not None, "asked for details although everybody agrees"
        assert value in self._words
        return self._words


def team(room: Room) -> Team:
    return cast("Team", room)


def description(**changes: Any) -> Description:
    fields = {"shape": [2, 3], "dtype": "torch.float32", "requires_grad": True, "stride": [3, 1], **changes}
    return [["conv.weight", [4], "torch.float32", True, [1]], ["fc.weight", *fields.values()]]


def test_a_description_holds_what_must_be_equal() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    assert describe([*layer.named_parameters()]) == [
        ["weight", [2, 3], "torch.float32", True, [3, 1]],
        ["bias", [2], "torch.float32", False, [1]],
    ]


def test_equal_models_have_equal_descriptions_whatever_their_values() -> None:
    one, two = (describe([*nn.BatchNorm2d(4).named_buffers(), *nn.Conv2d(3, 4, 3).named_parameters()]) for _ in "ab")
    assert one == two
    assert first_difference(one, two, 0, 1) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shape": [2, 4]}, "fc.weight has shape [2, 3] on rank 0 and [2, 4] on rank 5"),
        ({"dtype": "torch.float16"}, "fc.weight has dtype torch.float32 on rank 0 and torch.float16 on rank 5"),
        ({"requires_grad": False}, "fc.weight has requires_grad True on rank 0 and False on rank 5"),
        ({"stride": [1, 2]}, "fc.weight has memory order (stride) [3, 1] on rank 0 and [1, 2] on rank 5"),
    ],
)
def test_the_property_that_differs_is_named(changes: dict[str, Any], text: str) -> None:
    assert first_difference(description(), description(**changes), 0, 5) == text


def test_other_names_and_other_orders_are_told_apart() -> None:
    ours = description()
    swapped, renamed = [ours[1], ours[0]], [ours[0], ["head.weight", *ours[1][1:]]]
    assert first_difference(ours, renamed, 0, 1) == "rank 0 has fc.weight where rank 1 has head.weight"
    assert "registered in different orders" in str(first_difference(ours, swapped, 0, 1))


def test_the_first_tensor_that_only_one_has_is_named() -> None:
    ours = description()
    for left, right, owner in ((ours, ours[:1], 0), (ours[:1], ours, 3)):
        text = str(first_difference(left, right, 0, 3))
        assert f"the first only rank {owner} has is fc.weight" in text
        assert f"rank 0 has {len(left)} tensors, rank 3 {len(right)}" in text


def test_a_difference_is_found_from_both_sides() -> None:
    models = [description(), description(shape=[9]), description()[:1], [*reversed(description())]]
    for left, right in itertools.permutations(models, 2):
        assert first_difference(left, right, 0, 1) is not None


def test_workers_with_one_model_exchange_only_a_digest() -> None:
    room = Room()
    for model in (description(), description(), description(shape=[9])):
        check_same_model(team(room), model)
    (first,), (second,), (third,) = room.heard
    assert first == second != third
    assert all(0 <= digest < 2**63 for digest in (first, third)), "it travels as a 64-bit integer"


def test_the_odd_worker_is_named_on_all_workers() -> None:
    models = [description(), description(), description(shape=[9, 9])]
    for mine in models:
        with pytest.raises(MismatchError, match=r"different models: fc.weight .* on rank 0 and \[9, 9\] on rank 2"):
            check_same_model(team(Room([[1], [1], [2]], models)), mine)


def test_replicas_are_compared_bit_by_bit() -> None:
    room = Room()
    zeros = torch.zeros(2, 3)
    for value in (zeros, zeros.clone(), torch.zeros(3, 2).t(), -zeros):
        check_same_bits(team(room), [("weight", value)])
    assert room.heard[0] == room.heard[1] == room.heard[2]
    assert room.heard[0] != room.heard[3], "minus zero has other bits than zero"


def test_a_single_value_is_the_same_with_any_stride() -> None:
    room = Room()
    for value in (torch.ones(1), torch.ones(4)[::4], torch.ones(1).as_strided((1, 1), (7, 3)).view(1)):
        check_same_bits(team(room), [("scale", value)])
    assert room.heard[0] == room.heard[1] == room.heard[2]


def test_the_first_replica_that_differs_is_named() -> None:
    named = [("fc.weight", torch.ones(2)), ("fc.bias", torch.ones(2))]
    with pytest.raises(MismatchError, match=r"fc\.bias on rank 2 \(cat\) is not what rank 0 \(ape\) has"):
        check_same_bits(team(Room([[1, 2], [1, 2], [1, 3]])), named)
