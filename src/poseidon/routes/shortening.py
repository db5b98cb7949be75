"""Shorter messages without loss: rows that repeat, and values that are zero. Pure.

A bag of an ``EmbeddingBag`` gives all its rows the same gradient, so a table's touched rows repeat each other. Behind a
ReLU half of a linear layer's input is zero, and half of its output's gradient. Finding that takes a processor about a
nanosecond per byte at either end: less than the bytes that it saves take on a slow link, and more than on a fast one. A
device finds repeated rows in a millisecond or two, even where eight workers share it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from poseidon.planning.shipments import LEAST_SAVED, PLACE_BYTES

_MIXER = np.random.default_rng(2015).integers(1, 2**62, 64, dtype=np.int64) * 2 + 1
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
ITEMSIZES = frozenset(_WORDS)
"""Bytes of a value whose zeros can be left out."""


def find_repeats(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the distinct rows of ``values`` and, for each row, which of them it is; None if that saves too little.

    Rows are equal if their bits are. Of values on a device, it waits for the device.
    """
    row_bytes = values.shape[1] * values.element_size()
    if values.shape[0] < 2 or row_bytes % 8 or not values.is_contiguous():
        return None
    found = (_repeats_on_device if values.is_cuda else _repeats_in_memory)(values.view(torch.int64))
    return None if found is None else (found[0].view(values.dtype), found[1])


def _repeats_in_memory(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    words = rows.numpy()
    mixer = np.resize(_MIXER, words.shape[1])
    # Products wrap around, so what differs in high bits alone, as numbers of opposite sign do, must reach low ones.
    mixed = ((words ^ words >> 29) * mixer).sum(axis=1)
    _, first, which = np.unique(mixed, return_index=True, return_inverse=True)
    which = which.reshape(-1).astype(np.int32)  # NumPy 2.0 has another shape
    if not _saves_enough(rows, len(first)):
        return None
    distinct = words[first]
    if not np.array_equal(distinct[which], words):  # two rows were mixed to the same number
        return None
    return torch.from_numpy(distinct), torch.from_numpy(which)


def _repeats_on_device(rows: Tensor) -> tuple[Tensor, Tensor] | None:
    """Do the same by operations that a device has; of equal rows, any is taken."""
    mixed = ((rows ^ rows >> 29) * _mixer(rows.shape[1], rows.device)).sum(1)
    numbers, which = torch.unique(mixed, return_inverse=True)
    if not _saves_enough(rows, len(numbers)):
        return None
    one = torch.empty_like(numbers).scatter_(0, which, torch.arange(len(rows), device=rows.device))
    distinct = rows[one]
    if not torch.equal(distinct[which], rows):
        return None
    return distinct, which.to(torch.int32)


@lru_cache(maxsize=64)
def _mixer(width: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.resize(_MIXER, width)).to(device)


def _saves_enough(rows: Tensor, distinct: int) -> bool:
    saved = (len(rows) - distinct) * rows.shape[1] * rows.element_size() - len(rows) * PLACE_BYTES
    return saved >= LEAST_SAVED * rows.nbytes


def drop_zeros(data: Tensor, itemsize: int) -> Tensor | None:
    """Return bytes without the values that are zero, and a bit for each value; None if that saves too little.

    ``data`` holds values of ``itemsize`` bytes. A negative zero is not zero: it has a bit.
    """
    if itemsize not in _WORDS or not data.numel() or data.numel() % itemsize:
        return None
    values = data.numpy().view(_WORDS[itemsize])
    count = int(np.count_nonzero(values))
    if count * itemsize + _mask_bytes(values.size) > (1 - LEAST_SAVED) * values.nbytes:
        return None
    mask = values != 0
    # By their places: to select by a mask takes five times as long.
    kept = values[np.flatnonzero(mask)]
    return torch.from_numpy(np.concatenate([np.packbits(mask), kept.view(np.uint8)]))


def restore_zeros(short: Tensor, size_bytes: int, itemsize: int) -> Tensor:
    """Return what :func:`drop_zeros` shortened; ``ValueError`` if it cannot have been ``size_bytes`` long."""
    count = size_bytes // itemsize
    data = short.numpy()
    mask_bytes = _mask_bytes(count)
    places = np.flatnonzero(np.unpackbits(data[:mask_bytes], count=min(count, mask_bytes * 8)))
    kept = data[mask_bytes:]
    if kept.size != len(places) * itemsize or count * itemsize != size_bytes:
        raise ValueError(f"{data.size} bytes are not {size_bytes} bytes without their zeros")
    values = np.zeros(count, _WORDS[itemsize])
    values[places] = np.frombuffer(kept.tobytes(), values.dtype)  # they may begin where their type cannot be read
    return torch.from_numpy(values.view(np.uint8))


def _mask_bytes(count: int) -> int:
    return -(-count // 8)
