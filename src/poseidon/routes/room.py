"""The room that an all-gather has for a unit's rows of factors, and how rows lie in it without their zeros. Pure.

A collective needs one size on all workers, so that is fixed from what an exchange by messages has shown. Behind a ReLU
half of the values are zero, with dropout three quarters. Where that saves enough time on the wire, there is room only
for the others: a bit for each value, then those that are not zero, in their order. ``shortening.py`` does the same on
the host, in messages of any size. A device cannot tell the host at once whether its values fit: that is known a little
later (:attr:`~poseidon.routes.base.Exchange.has_late_flags`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poseidon.planning.shipments import LEAST_SAVED, SLACK

_SPARE_ROWS, _SPARE_VALUES = 1.25, 1.1
"""Room for rows and for values, once a unit has had more than expected; what is not used of it travels, too."""
_EMPTIEST = 0.5
"""Share of the room that must be filled on average; with less, messages carry fewer bytes."""
_MISFITS, _OVERFLOWS = 3, 5
"""After so many in short succession, a unit stays with messages, or its zeros travel too."""
_QUIET = 100
"""After so many exchanges that fitted, what did not fit before is forgotten: layers change slowly in long trainings."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""As which the bits of a value are read, by its bytes."""
_ALIGNMENT = 8


@dataclass(frozen=True)
class Room:
    """How many rows of one unit each worker may bring to an all-gather, and of which type; equal on all workers."""

    rows: int
    """Zero: the unit travels by messages."""
    dtype: torch.dtype
    misfits: int = 0
    values: int = 0
    """How many values of these rows need not be zero; 0: zeros travel, too."""
    overflows: int = 0

    @classmethod
    def after(
        cls, before: Room | None, counts: Sequence[int], dtype: torch.dtype, values: int = 0, fitted: int = 0
    ) -> Room | None:
        """Return the room after an exchange by messages of so many rows per worker; None: not known yet.

        ``values``: the most that any worker had which are not zero; 0: zeros shall travel, too. ``fitted``: how many
        exchanges did, since the last one that did not.
        """
        most = max(counts)
        if before is None:
            if most == 0:
                return None
            return cls(most, dtype, values=math.ceil(values * SLACK))._unless_empty(counts)
        if fitted >= _QUIET:
            before = replace(before, misfits=0, overflows=0)
        if before.values and before.holds(most, dtype):
            more = replace(before, overflows=before.overflows + 1)
            return replace(more, values=math.ceil(values * _SPARE_VALUES) if more.overflows < _OVERFLOWS else 0)
        more = replace(before, rows=math.ceil(most * _SPARE_ROWS), dtype=dtype, misfits=before.misfits + 1)
        return replace(more, values=math.ceil(values * _SPARE_VALUES) if before.values else 0)._unless_empty(counts)

    def _unless_empty(self, counts: Sequence[int]) -> Room:
        is_hopeless = self.misfits == _MISFITS or sum(counts) < _EMPTIEST * self.rows * len(counts)
        return replace(self, rows=0, values=0) if is_hopeless else self

    def holds(self, count: int, dtype: torch.dtype) -> bool:
        """Return whether a worker's rows fit, whatever their values."""
        return count == 0 or (count <= self.rows and torch.promote_types(dtype, self.dtype) is self.dtype)

    def unless_useless(self, width: int, least_bytes: float) -> Room:
        """Return a room for zeros, too, unless leaving them out saves a fair share, and ``least_bytes`` a worker."""
        plain = self.rows * width * self.dtype.itemsize
        saved = plain - self.layout(width).size_bytes
        return self if saved >= max(LEAST_SAVED * plain, least_bytes) else replace(self, values=0)

    def layout(self, width: int) -> RoomLayout:
        """Return how rows of ``width`` values lie without their zeros."""
        return RoomLayout(self.rows, width, self.values, self.dtype)


@dataclass(frozen=True)
class RoomLayout:
    """One worker's rows without their zeros, as bytes: a bit for each value, then ``values`` of these and a spare."""

    rows: int
    width: int
    values: int
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Of the whole."""
        return self.values_at + _align((self.values + 1) * self.dtype.itemsize)

    @property
    def bitmap_bytes(self) -> int:
        """Of the bits, with which it begins."""
        return -(-self.rows * self.width // 8)

    @property
    def values_at(self) -> int:
        """Where the values begin, in bytes."""
        return _align(self.bitmap_bytes)

    def drop_zeros(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes of these rows, and how many values are not zero: more than fit, if the bytes are useless.

        A negative zero is not zero: it has a bit. Nothing here waits for a device.
        """
        integers = rows.view(INTEGERS[self.dtype.itemsize]).view(-1)
        mask = integers != 0
        counts = mask.cumsum(0, dtype=self._index(integers))
        data = torch.zeros(self.size_bytes, dtype=torch.uint8, device=rows.device)  # what aligns the parts, too
        padded = F.pad(mask, (0, -mask.numel() % 8)).view(-1, 8)
        data[: self.bitmap_bytes] = (padded << _shifts(rows.device)).sum(1, dtype=torch.uint8)
        # By asking where the count reaches each number: to scatter values would be slow where torch is to be
        # deterministic. Behind the last one there is a zero, which the spare place gets if all fit.
        numbers = torch.arange(1, self.values + 2, dtype=counts.dtype, device=rows.device)
        sources = torch.searchsorted(counts, numbers, out_int32=counts.dtype is torch.int32)
        values = F.pad(integers, (0, 1)).index_select(0, sources)
        data[self.values_at :].view(integers.dtype)[: self.values + 1] = values
        return data, counts[-1]

    def restore_zeros(self, data: Tensor) -> Tensor:
        """Return the rows of all workers, given what :meth:`drop_zeros` returned on each, one after the other."""
        parts = data.view(-1, self.size_bytes)
        bits = parts[:, : self.bitmap_bytes].unsqueeze(2) >> _shifts(data.device) & 1
        mask = bits.view(len(parts), -1)[:, : self.rows * self.width] != 0
        integers, itemsize = data.view(INTEGERS[self.dtype.itemsize]), self.dtype.itemsize
        index = self._index(integers, mask)
        # One long sum, not one for each worker: a device adds up each row of those with a single block of threads.
        sums = mask.reshape(-1).cumsum(0, dtype=index).view_as(mask)
        before = F.pad(sums[:-1, -1:], (0, 0, 1, 0))
        places = (sums - before).sub_(1).clamp_(max=self.values)
        places.masked_fill_(mask.logical_not_(), self.values)  # the spare place, which is zero
        first, stride = self.values_at // itemsize, self.size_bytes // itemsize
        places += torch.arange(first, integers.numel(), stride, dtype=index, device=data.device).unsqueeze(1)
        return integers.index_select(0, places.view(-1)).view(self.dtype).view(-1, self.width)

    @staticmethod
    def _index(*tensors: Tensor) -> torch.dtype:
        """Return a type that holds any place; the shorter one is half the traffic, and there is little else here."""
        most = max(tensor.numel() for tensor in tensors)
        return torch.int32 if most < torch.iinfo(torch.int32).max else torch.int64


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has rows that can be sent: it is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def count_filled(factor: Tensor) -> Tensor:
    """Return how many values are not zero, on the device, which need not have come so far.

    A negative zero counts, and so does every value of an odd type.
    """
    integer = INTEGERS.get(factor.element_size())
    is_odd = not is_plain(factor) or factor.is_complex() or factor.is_neg()
    if integer is None or is_odd or type(factor) not in (Tensor, nn.Parameter):
        return torch.tensor(factor.numel(), device=factor.device)
    return torch.count_nonzero(factor.detach().view(integer))


def share_filled(*factors: Tensor) -> float:
    """Return which share of the values of all these tensors is not zero; waits for a device."""
    count = sum(int(count_filled(each)) for each in factors)
    return count / max(sum(each.numel() for each in factors), 1)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _align(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
