"""Bytes that changed a little, for somebody who has the old ones. Pure and without loss.

The bits of a float count up as its magnitude does, so a small change of a value is a small difference of two whole
numbers: its upper bytes are zero. Differences are stored byte by byte, all lowest ones first, and rows of zeros are
left out. What did not change takes one bit for each :data:`ROW` values and byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROW = 256
"""Values that are stored or left out together."""
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode_change(old: memoryview, new: memoryview, itemsize: int) -> bytes:
    """Return what turns ``old`` into ``new``, values of ``itemsize`` bytes; empty if nothing is to be done."""
    if np.array_equal(np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)):
        return b""
    width, size = (itemsize if itemsize in _WORDS else 1), new.nbytes
    rows = -(-size // (width * ROW))
    planes = np.zeros((rows * ROW, width), np.uint8)
    planes.reshape(-1)[:size] = _difference(old, new, width)
    planes = np.ascontiguousarray(planes.T).reshape(width * rows, ROW)
    is_there = planes.any(axis=1)
    return bytes(np.packbits(is_there)) + planes[is_there].tobytes()


def apply_change(old: memoryview, change: bytes | bytearray | memoryview, itemsize: int) -> None:
    """Turn ``old`` into what it became, in place; ``ValueError`` if that is no change of so many bytes."""
    if not len(change):
        return
    width, size = (itemsize if itemsize in _WORDS else 1), old.nbytes
    rows = -(-size // (width * ROW))
    head = -(-width * rows // 8)
    data = np.frombuffer(change, np.uint8)
    is_there = np.unpackbits(data[:head], count=width * rows).astype(bool) if len(data) >= head else np.zeros(0, bool)
    if len(data) != head + int(is_there.sum()) * ROW:
        raise ValueError(f"a change of {len(data)} bytes does not fit to {size} bytes")
    planes = np.zeros((width * rows, ROW), np.uint8)
    planes[is_there] = data[head:].reshape(-1, ROW)
    difference = np.ascontiguousarray(planes.reshape(width, rows * ROW).T).reshape(-1)[:size]
    _add(old, difference, width)


def _difference(old: memoryview, new: memoryview, width: int) -> NDArray[np.uint8]:
    if width == 1:
        return np.frombuffer(new, np.uint8) ^ np.frombuffer(old, np.uint8)
    word = _WORDS[width]
    moved = np.frombuffer(new, word) - np.frombuffer(old, word)  # modulo the largest word
    # 0, -1, 1, -2, 2 ... become 0, 1, 2, 3, 4 ...
    sign = (moved >> word(8 * width - 1)).astype(bool)
    moved <<= word(1)
    np.invert(moved, out=moved, where=sign)
    return moved.view(np.uint8)


def _add(old: memoryview, difference: NDArray[np.uint8], width: int) -> None:
    if width == 1:
        mine = np.frombuffer(old, np.uint8)
        mine ^= difference
        return
    word = _WORDS[width]
    mine, moved = np.frombuffer(old, word), difference.view(word)
    sign = (moved & word(1)).astype(bool)
    moved >>= word(1)
    np.invert(moved, out=moved, where=sign)
    mine += moved
