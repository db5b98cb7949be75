"""Rows of factors from all workers: types, uneven counts, the product, and the room for them in an all-gather."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poseidon.engine.discover import find_units
from poseidon.routes.base import LiveUnit
from poseidon.routes.factors import Factors, rebuild, row_dtype
from poseidon.routes.parcels import Gathered
from poseidon.routes.room import Room
from poseidon.routes.table_groups import _means

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
WORD = {F32: 0, torch.float64: 1, FP16: 2, BF16: 3}
"""Number of a type in a parcel."""


def unit_of(inputs: int, outputs: int, **kwargs: Any) -> LiveUnit:
    (unit,) = find_units(nn.Linear(inputs, outputs, **kwargs))
    return unit


def gathered(parts: list[Tensor]) -> Gathered:
    """Return what arrives if each worker sends one of these matrices."""
    flat = [part.contiguous().view(torch.uint8).view(-1, 1) for part in parts]
    words = tuple(WORD[part.dtype] << 8 for part in parts)
    return Gathered(torch.cat(flat), tuple(part.shape[0] for part in flat), words)


@pytest.mark.parametrize("dtypes", [(BF16, BF16, BF16), (BF16, F32, BF16), (BF16, FP16, FP16), (F32, BF16, F32)])
def test_every_workers_rows_are_read_in_their_own_type(dtypes: tuple[torch.dtype, ...]) -> None:
    parts = [torch.randn(count, 5).to(dtype) for count, dtype in zip((3, 0, 1), dtypes, strict=True)]
    factors = Factors.of(gathered(parts), unit_of(3, 2))
    assert factors.counts == (3, 0, 1)
    assert torch.equal(factors.rows.double(), torch.cat([part.double() for part in parts]))


def test_a_worker_that_brings_nothing_does_not_widen_the_others_rows() -> None:
    rows = torch.randn(4, 5).to(BF16)
    assert Factors.of(gathered([torch.empty(0, 5), rows]), unit_of(3, 2)).rows.dtype is BF16


def test_rows_of_several_calls_travel_in_a_type_that_holds_all() -> None:
    unit = unit_of(3, 2)

    def pair(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, 3, dtype=dtype), torch.zeros(2, 2, dtype=dtype)

    assert row_dtype(unit, [pair(BF16), pair(BF16)]) is BF16
    assert row_dtype(unit, [pair(F32), pair(BF16)]) is F32
    assert row_dtype(unit, [pair(FP16), pair(BF16)]) is F32
    assert row_dtype(unit, []) is F32


@pytest.mark.parametrize("short", [BF16, FP16])
@pytest.mark.parametrize("parameters", [F32, BF16, FP16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_product_of_short_factors_is_exact_to_float32(
    short: torch.dtype, parameters: torch.dtype, device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    unit = unit_of(40, 30, dtype=parameters, device=device)
    rows = torch.randn(90, 70, generator=torch.Generator().manual_seed(1)).to(device, short)
    gradients = rebuild(SimpleNamespace(size=3), unit, rows)  # type: ignore[arg-type]
    x, g = rows[:, :40].double(), rows[:, 40:].double()
    for gradient, parameter, truth in zip(gradients, unit.parameters, (g.t() @ x / 3, g.sum(0) / 3), strict=True):
        assert gradient.dtype is parameter.dtype
        # Rounded once.
        bits = 2.0 ** -{F32: 20, BF16: 8, FP16: 11}[parameters]
        torch.testing.assert_close(gradient.double(), truth, rtol=bits, atol=2e-6)


def test_a_transposed_weight_gets_a_transposed_gradient() -> None:
    unit = unit_of(4, 4)
    x, g = torch.randn(6, 4), torch.randn(6, 4)
    swapped = replace(unit, is_transposed=True)
    weight, bias = rebuild(SimpleNamespace(size=2), swapped, torch.cat([g, x], 1))  # type: ignore[arg-type]
    torch.testing.assert_close(weight, x.t() @ g / 2)
    torch.testing.assert_close(bias, g.sum(0) / 2)


def test_a_layer_with_parameters_of_two_types_gets_gradients_of_both() -> None:
    linear = nn.Linear(3, 2, dtype=BF16)
    linear.bias = nn.Parameter(linear.bias.detach().float())
    (unit,) = find_units(linear)
    gradients = rebuild(SimpleNamespace(size=2), unit, torch.ones(4, 5, dtype=BF16))  # type: ignore[arg-type]
    assert [gradient.dtype for gradient in gradients] == [BF16, F32]


def test_room_is_made_for_the_rows_that_were_seen() -> None:
    assert Room.after(None, [0, 0], BF16) is None
    room = Room.after(None, [8, 7], BF16)
    assert room == Room(8, BF16)
    assert room.holds(8, BF16)
    assert room.holds(0, F32)
    assert not room.holds(9, BF16)
    assert not room.holds(8, FP16)
    assert not room.holds(8, F32)
    assert Room(8, F32).holds(8, BF16)


def test_rows_that_vary_get_more_room_a_few_times_and_then_stay_with_messages() -> None:
    room = Room.after(Room(8, BF16), [10, 8], BF16)
    assert room == Room(13, BF16, misfits=1)
    room = Room.after(room, [8, 16], BF16)
    assert room == Room(20, BF16, misfits=2)
    room = Room.after(room, [24, 24], BF16)
    assert room == Room(0, BF16, misfits=3)


def test_rows_of_a_few_workers_only_stay_with_messages() -> None:
    room = Room.after(None, [64, 2, 3, 5], BF16)
    assert room is not None
    assert room.rows == 0


@pytest.mark.parametrize("short", [BF16, FP16])
def test_touched_rows_of_a_short_type_are_added_in_float32(short: torch.dtype) -> None:
    big = 40_000.0  # whose sum float16 does not hold
    parts = [
        (torch.tensor([7, 2]), torch.tensor([[1.0, big], [3.0, 4.0]]).to(short)),
        (torch.tensor([], dtype=torch.long), torch.empty(0, 2).to(short)),
        (torch.tensor([2, 5]), torch.tensor([[0.001, 1.0], [6.0, 7.0]]).to(short)),
        (torch.tensor([7]), torch.tensor([[2.0, big]]).to(short)),
    ]
    touched, means = _means(parts)
    dense = torch.zeros(8, 2, dtype=torch.float64)
    for indices, values in parts:
        dense.index_add_(0, indices, values.double())
    assert touched.tolist() == [2, 5, 7]
    torch.testing.assert_close(means.double(), dense[touched] / 4, rtol=1e-7, atol=0)
