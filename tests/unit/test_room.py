"""The room of an all-gather: rows without zeros come back with the same bits, and what does not fit is noticed."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.routes.room import INTEGERS, Room, RoomLayout, count_filled, share_filled

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
DTYPES = [BF16, torch.float16, F32, F64]
DEVICE = os.environ.get("POSEIDON_TEST_DEVICE", "cpu")


def draw_rows(rows: int, width: int, dtype: torch.dtype, filled: float, seed: int) -> torch.Tensor:
    """Return any bits, not-a-numbers among them, of which about the share ``filled`` is not zero."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**15), 2**15, (rows, width), generator=generator).to(INTEGERS[dtype.itemsize])
    integers <<= 8 * dtype.itemsize - 16
    mask = torch.rand(rows, width, generator=generator) < filled
    return torch.where(mask, integers, 0).view(dtype).to(DEVICE)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(INTEGERS[one.element_size()]), other.view(INTEGERS[other.element_size()]))


def count(rows: torch.Tensor) -> int:
    return int(count_filled(rows))


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_rows_come_back_with_the_same_bits(
    rows: int, width: int, dtype: torch.dtype, filled: float, spare: int, workers: int
) -> None:
    each = [draw_rows(rows, width, dtype, filled, seed) for seed in range(workers)]
    layout = RoomLayout(rows, width, max(map(count, each)) + spare, dtype)
    sent, counts = zip(*map(layout.drop_zeros, each), strict=True)
    assert list(map(int, counts)) == list(map(count, each))
    assert {data.numel() for data in sent} == {layout.size_bytes}
    assert same_bits(layout.restore_zeros(torch.cat(sent)), torch.cat(each))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_negative_zero_is_not_left_out(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0, -0.0, 1.0]], dtype=dtype, device=DEVICE)
    layout = RoomLayout(1, 3, 2, dtype)
    data, filled = layout.drop_zeros(rows)
    assert int(filled) == 2
    assert same_bits(layout.restore_zeros(data), rows)


def test_more_values_than_fit_are_counted_and_harm_no_other_worker() -> None:
    many, few = draw_rows(4, 9, F32, 1.0, 1), draw_rows(4, 9, F32, 0.3, 2)
    layout = RoomLayout(4, 9, count(few), F32)
    data, filled = layout.drop_zeros(many)
    assert int(filled) == count(many) > layout.values
    restored = layout.restore_zeros(torch.cat([data, layout.drop_zeros(few)[0]]))
    assert same_bits(restored[4:], few)


def test_room_for_values_has_a_little_slack_and_more_after_an_overflow() -> None:
    room = Room.after(None, [8, 8], F32, values=100)
    assert room == Room(8, F32, values=105)
    for overflows, values in enumerate((120, 200, 250, 280), start=1):
        room = Room.after(room, [8, 8], F32, values=values)
        assert room == Room(8, F32, values=math.ceil(1.1 * values), overflows=overflows)
    # The fifth time zeros travel too: the rows themselves have always fitted, so messages are not needed.
    assert Room.after(room, [8, 8], F32, values=310) == Room(8, F32, overflows=5)


def test_what_did_not_fit_long_ago_is_forgotten() -> None:
    often, rarely = Room(8, F32, values=100), Room(8, F32, values=100)
    for _ in range(5):
        often = Room.after(often, [8, 8], F32, values=120, fitted=20)
        rarely = Room.after(rarely, [8, 8], F32, values=120, fitted=200)
    assert not often.values
    assert rarely == Room(8, F32, values=132, overflows=1)
    for count in range(9, 15):
        rarely = Room.after(rarely, [count, 8], F32, fitted=200)
        assert rarely.rows >= count


def test_more_rows_get_more_room_for_their_values_too() -> None:
    room = Room.after(Room(8, F32, values=100), [16, 8], F32, values=200)
    assert room == Room(20, F32, misfits=1, values=math.ceil(1.1 * 200))
    # Once zeros travel, they continue to.
    assert Room.after(Room(8, F32), [16, 8], F32, values=200) == Room(20, F32, misfits=1)
    # Where messages remain, they leave zeros out by themselves.
    assert Room.after(None, [64, 2, 3, 5], F32, values=10) == Room(0, F32)


def test_zeros_are_left_out_only_where_that_saves_enough() -> None:
    half = Room(32, F32, values=16 * 100)
    assert half.unless_useless(100, least_bytes=1000) == half
    assert half.unless_useless(100, least_bytes=10000) == Room(32, F32)
    assert Room(32, F32, values=30 * 100).unless_useless(100, least_bytes=0) == Room(32, F32)
    # A bit for each value is an eighth of a value in bf16 and a quarter of that in float32.
    assert Room(32, BF16, values=24 * 100).unless_useless(100, 0) == Room(32, BF16)
    assert Room(32, F32, values=24 * 100).unless_useless(100, 0).values


def test_the_share_that_is_filled_counts_both_factors() -> None:
    assert share_filled(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 3.0], [0.0, 0.0]])) == 0.5
    assert share_filled(torch.empty(0, 3)) == 0.0
    assert share_filled(torch.tensor([0.0, -0.0])) == 0.5


def test_values_that_cannot_be_counted_count_as_filled() -> None:
    sparse = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).to_sparse()
    assert count(sparse) == 4
    assert count(torch.zeros(3, dtype=torch.complex64)) == 3
    assert count(torch.zeros(2, 5)[:, ::2]) == 0
