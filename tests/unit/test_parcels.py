"""Messages with rows: what was written is read, and what does not fit is refused with the worker's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from poseidon.errors import MismatchError
from poseidon.routes.parcels import Gathered, Parcel, join_opened, open_message, write_message


def _rows(count: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, width), generator=generator, dtype=torch.uint8)


def _parcels(counts: list[int], seed: int, step: int = 3, widths: tuple[int, ...] = (16, 1, 24)) -> list[Parcel]:
    """Return parcels of three units, whose rows have different sizes; not all begin at a multiple of a word."""
    pairs = zip(counts, widths, strict=True)
    return [
        Parcel(number, f"unit {number}", step, _rows(count, width, seed + number), flags=seed)
        for number, (count, width) in enumerate(pairs)
    ]


def read_messages(messages: Sequence[Tensor], parcels: Sequence[Parcel], rank: int) -> list[Gathered]:
    opened = [open_message(message, parcels, rank, peer) for peer, message in enumerate(messages)]
    return join_opened(opened, parcels, rank)


def test_every_worker_reads_all_rows_in_rank_order() -> None:
    brought = [_parcels([2, 5, 0], 10), _parcels([0, 0, 0], 20), _parcels([1, 3, 4], 30)]
    messages = [write_message(parcels) for parcels in brought]
    for rank, mine in enumerate(brought):
        for number, gathered in enumerate(read_messages(messages, mine, rank)):
            parcels = [parcels[number] for parcels in brought]
            assert gathered.counts == tuple(len(parcel.rows) for parcel in parcels)
            assert gathered.flags == (10, 20, 30)
            assert torch.equal(gathered.rows, torch.cat([parcel.rows for parcel in parcels]))


def test_rows_that_are_staged_stay_apart() -> None:
    brought = [_parcels([2, 5, 0], 10), _parcels([0, 0, 0], 20), _parcels([1, 3, 4], 30)]
    messages = [write_message(parcels) for parcels in brought]
    mine = [replace(parcel, stage=lambda rows: rows.clone().bitwise_not_()) for parcel in brought[1]]
    for number, gathered in enumerate(read_messages(messages, mine, 1)):
        assert gathered.rows.numel() == 0
        assert gathered.counts == tuple(len(parcels[number].rows) for parcels in brought)
        for part, parcels in zip(gathered.parts, brought, strict=True):
            assert torch.equal(part.bitwise_not(), parcels[number].rows.view(-1))


def test_zeros_need_not_travel_and_come_back() -> None:
    rows = torch.zeros(40, 8, dtype=torch.uint8)
    rows[::4] = _rows(10, 8, 1) | 1
    mine = [Parcel(0, "unit", 3, rows, itemsize=4), Parcel(1, "other", 3, _rows(3, 8, 2), itemsize=4)]
    theirs = [Parcel(0, "unit", 3, _rows(5, 8, 3)), Parcel(1, "other", 3, rows)]
    messages = [write_message(mine), write_message(theirs)]
    assert messages[0].numel() < 96 + rows.numel() // 2
    for gathered, one, other in zip(read_messages(messages, theirs, 1), mine, theirs, strict=True):
        assert torch.equal(gathered.rows, torch.cat([one.rows, other.rows]))


def test_nobody_has_rows() -> None:
    brought = [_parcels([0, 0, 0], 10), _parcels([0, 0, 0], 20)]
    gathered = read_messages([write_message(parcels) for parcels in brought], brought[0], 0)
    assert [tuple(each.rows.shape) for each in gathered] == [(0, 16), (0, 1), (0, 24)]


@pytest.mark.parametrize(
    ("theirs", "complaint"),
    [
        (_parcels([1, 1, 1], 20, step=4), "step 3; rank 1 rows of 16 bytes, step 4"),
        (_parcels([1, 1, 1], 20, widths=(8, 1, 24)), "rank 1 rows of 8 bytes"),
        (_parcels([1, 1, 1], 20)[:1], "rank 1 sent 64 bytes in step 3, which are not the 3 parcel"),
    ],
    ids=["step", "width", "parcels"],
)
def test_a_worker_that_brings_something_else_is_named(theirs: list[Parcel], complaint: str) -> None:
    mine = _parcels([2, 2, 2], 10)
    with pytest.raises(MismatchError, match=complaint):
        read_messages([write_message(mine), write_message(theirs)], mine, 0)


@pytest.mark.parametrize(("word", "value"), [(0, -5), (0, 1 << 40), (4, 7), (5, 2), (5, 3)])
def test_a_message_that_lies_about_its_size_is_refused(word: int, value: int) -> None:
    mine = _parcels([2, 2, 2], 10)
    message = write_message(mine)
    message[:48].view(torch.int64)[word] = value
    with pytest.raises(MismatchError, match="rank 1 sent"):
        read_messages([write_message(mine), message], mine, 0)
