"""Bytes of which some have changed, for somebody who has the old ones. Pure and without loss.

Blocks of :data:`BLOCK` bytes that are as they were are left out: a bit for each says which. That takes hardly more time
than reading the bytes; what has changed everywhere is left to the caller to send as it is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024
_WORD = 8


def encode_change(old: memoryview, new: memoryview) -> bytes | None:
    """Return what turns ``old`` into ``new``: nothing if they are equal, None if it would not be much shorter."""
    before, after = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    whole = len(after) // BLOCK * BLOCK
    differs = _as_words(before[:whole]) != _as_words(after[:whole])
    is_there = differs.reshape(-1, BLOCK // _WORD).any(axis=1)
    has_rest = not np.array_equal(before[whole:], after[whole:])
    if not has_rest and not is_there.any():
        return b""
    if 2 * int(is_there.sum()) * BLOCK > len(after):
        return None
    changed: bytes = after[:whole].reshape(-1, BLOCK)[is_there].tobytes()
    rest: bytes = after[whole:].tobytes() if has_rest else b""
    return bytes(np.packbits(is_there)) + changed + rest


def apply_change(old: memoryview, change: bytes | bytearray | memoryview) -> None:
    """Turn ``old`` into what it became, in place; ``ValueError`` if that is no change of so many bytes."""
    if not len(change):
        return
    mine, data = np.frombuffer(old, np.uint8), np.frombuffer(change, np.uint8)
    blocks, rest = divmod(len(mine), BLOCK)
    head = -(-blocks // 8)
    is_there = np.unpackbits(data[:head], count=blocks).astype(bool) if len(data) >= head else np.zeros(blocks, bool)
    stored = int(is_there.sum()) * BLOCK
    if len(data) not in (head + stored, head + stored + rest):
        raise ValueError(f"a change of {len(data)} bytes does not fit to {len(mine)} bytes")
    mine[: blocks * BLOCK].reshape(blocks, BLOCK)[is_there] = data[head : head + stored].reshape(-1, BLOCK)
    if len(data) > head + stored:
        mine[blocks * BLOCK :] = data[head + stored :]


def _as_words(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return data.view(np.uint64)
