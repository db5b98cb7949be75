"""What workers bring to an exchange of rows, and what a message holds of it. Pure.

A message carries the parcels of one shipment: some words for each, then the rows of all. It says by itself how many
rows it has, so a worker may bring any number: an uneven last batch, a worker without input. Zeros may be left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poseidon.errors import MismatchError
from poseidon.routes.shortening import ITEMSIZES, drop_zeros, restore_zeros

_WORDS = 6
"""Per parcel: rows, bytes of a row, flags, step, bytes in the message; bytes of a value if zeros are left out, or 0."""
_WORD_BYTES = 8


@dataclass(frozen=True)
class Parcel:
    """What this worker brings for one unit."""

    unit: int
    """Number of the unit, equal on all workers."""
    name: str
    step: int
    rows: Tensor
    """Bytes, two-dimensional, contiguous, in host memory; read-only until they have left."""
    flags: int = 0
    """One word defined by the route, delivered with the rows."""
    settle: Callable[[], None] | None = None
    """Called on another thread before ``rows`` is read; waits until the device has filled it."""
    land: Callable[[Gathered], Any] | None = None
    """Called on another thread with the result; its return value replaces the :class:`Gathered` in the future."""
    shipment: tuple[int, ...] = ()
    """Units whose parcels leave together with this one, itself included, in one order on all workers; empty: alone."""
    meanwhile: Callable[[], None] | None = None
    """Called on another thread while the rows travel: a time to prepare for the result."""
    stage: Callable[[Tensor], Tensor] | None = None
    """Called on another thread with each worker's rows as soon as they are here; if given, they stay apart."""
    form: str = "factors"
    """What it is, for those who count what is sent: ``factors`` or ``rows``."""
    itemsize: int = 0
    """Bytes of a value, if many values may be zero and need not travel; 0: they travel as they are."""


@dataclass(frozen=True)
class Gathered:
    """What all workers brought for one unit."""

    rows: Tensor
    """All rows in rank order, as bytes in host memory; none if they stay apart."""
    counts: tuple[int, ...]
    """Rows per rank."""
    flags: tuple[int, ...]
    """Flag word per rank."""
    parts: tuple[Tensor, ...] = ()
    """Rows per rank that stay apart: what :attr:`Parcel.stage` returned."""


Opened = tuple[list[list[int]], list[Tensor]]
"""The words of each parcel in a message, and its rows."""


def write_message(parcels: Sequence[Parcel]) -> Tensor:
    """Return the message with all of these parcels, as bytes."""
    words, bodies = [], []
    for parcel in parcels:
        data = parcel.rows.view(-1)
        short = drop_zeros(data, parcel.itemsize) if parcel.itemsize else None
        body = data if short is None else short
        itemsize = 0 if short is None else parcel.itemsize
        words.append((*parcel.rows.shape, parcel.flags, parcel.step, body.numel(), itemsize))
        bodies.append(body)
    return torch.cat([torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8).view(-1), *bodies])


def open_message(message: Tensor, parcels: Sequence[Parcel], rank: int, peer: int) -> Opened:
    """Return what is in the message of ``peer``, given what ``rank`` brings.

    Raises :class:`MismatchError` if these are not the same parcels.
    """
    head = len(parcels) * _WORDS * _WORD_BYTES
    if message.numel() >= head:
        words: list[list[int]] = message[:head].view(torch.int64).view(-1, _WORDS).tolist()
        sizes = [size for _, _, _, _, size, _ in words]
        if min(sizes) >= 0 and head + sum(sizes) == message.numel():
            rows: list[Tensor] = []
            with contextlib.suppress(ValueError):
                bodies = message[head:].split(sizes)
                rows = [_restore(body, each) for body, each in zip(bodies, words, strict=True)]
            if rows:
                return words, [_stage(parcel, each) for parcel, each in zip(parcels, rows, strict=True)]
    raise MismatchError(
        f"{parcels[0].name}: rank {peer} sent {message.numel()} bytes in step {parcels[0].step}, which are not the "
        f"{len(parcels)} parcel(s) that rank {rank} expects; do all workers run the same code?"
    )


def join_opened(
    opened: Sequence[Opened], parcels: Sequence[Parcel], rank: int, pin_memory: bool = False
) -> list[Gathered]:
    """Return what all workers brought for each parcel, given their opened messages by rank, that of ``rank`` included.

    Raises :class:`MismatchError` for a worker that brings something else.
    """
    gathered = []
    for number, parcel in enumerate(parcels):
        words, parts = zip(*((words[number], parts[number]) for words, parts in opened), strict=True)
        counts, widths, flags, _, _, _ = zip(*words, strict=True)
        width = next((width for count, width in zip(counts, widths, strict=True) if count), parcel.rows.shape[1])
        _check(parcel, words, rank)
        apart = () if parcel.stage is None else parts
        joined = () if apart else parts
        size = sum(part.numel() for part in joined)
        rows = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin_memory and bool(joined))
        if joined:
            torch.cat(joined, out=rows)
        gathered.append(Gathered(rows.view(-1, width) if size else rows.view(0, width), counts, flags, apart))
    return gathered


def _stage(parcel: Parcel, rows: Tensor) -> Tensor:
    return rows if parcel.stage is None else parcel.stage(rows)


def _restore(body: Tensor, words: Sequence[int]) -> Tensor:
    """Return the bytes of a parcel's rows."""
    count, width, _, _, size, itemsize = words
    if itemsize in ITEMSIZES and 0 <= count * width <= size * itemsize * 8:
        return restore_zeros(body, count * width, itemsize)
    if itemsize or count * width != size:
        raise ValueError(f"{size} bytes are not {count} rows of {width} bytes")
    return body


def _check(parcel: Parcel, by_rank: Sequence[Sequence[int]], rank: int) -> None:
    widths = {width for count, width, *_ in by_rank if count}
    for peer, (_, width, _, step, *_) in enumerate(by_rank):
        if (len(widths) > 1 and width != parcel.rows.shape[1]) or step != parcel.step:
            raise MismatchError(
                f"{parcel.name}: rank {rank} brings rows of {parcel.rows.shape[1]} bytes, step {parcel.step}; rank "
                f"{peer} rows of {width} bytes, step {step}; do all workers run the same code and autocast?"
            )
