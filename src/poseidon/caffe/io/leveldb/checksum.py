"""CRC-32C (Castagnoli), vectorised: LevelDB guards every block and every log record with it.

A checksum is linear over GF(2). The content is cut into equally long lanes, all lanes advance together four bytes at
a time, and neighbouring lanes are then joined by "append that many zero bytes" operators.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_SHORT_BYTES = 4096
_MASK_DELTA = 0xA282EAD8

Words = NDArray[np.uint32]


class _Operator:
    """A linear map of 32 bits, as two tables for the lower and the upper 16 bits."""

    def __init__(self, columns: Words) -> None:
        """``columns[i]`` is the image of bit i."""
        self.columns = columns
        self._low, self._high = _spread(columns[:16]), _spread(columns[16:])

    def __call__(self, states: Words) -> Words:
        result: Words = self._low[states & 0xFFFF] ^ self._high[states >> 16]
        return result


def _spread(columns: Words) -> Words:
    """Return the images of all 16-bit numbers from the images of their bits."""
    table = np.zeros(1, np.uint32)
    for column in columns:
        table = np.concatenate([table, table ^ column])
    return table


@lru_cache(maxsize=64)
def _append_zeros(words: int) -> _Operator:
    """Return the operator that advances a state over ``words`` times four zero bytes."""
    if words == 1:
        columns = np.uint32(1) << np.arange(32, dtype=np.uint32)
        for _ in range(32):
            columns = (columns >> 1) ^ np.where(columns & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
        return _Operator(columns.astype(np.uint32))
    half = _append_zeros(words // 2)
    return _Operator(half(half.columns))


def crc32c(content: bytes) -> int:
    """Return the CRC-32C of ``content``."""
    if len(content) < 4:
        return _crc32c_short(content)
    # Leading zeros do not change a zero state, so lanes are padded at the front; the usual start value of all ones is
    # equivalent to inverting the first four bytes.
    lane_words = 8 if len(content) < _SHORT_BYTES else 32
    lanes = -(-len(content) // (4 * lane_words))
    padded = np.zeros(lanes * 4 * lane_words, np.uint8)
    start = len(padded) - len(content)
    padded[start:] = np.frombuffer(content, np.uint8)
    padded[start : start + 4] ^= 0xFF
    words = padded.view("<u4").reshape(lanes, lane_words)
    step = _append_zeros(1)
    states = np.zeros(lanes, np.uint32)
    for column in range(lane_words):
        states = step(states ^ words[:, column])
    return _join(states, lane_words) ^ 0xFFFFFFFF


def _join(states: Words, lane_words: int) -> int:
    """Return the state after all lanes, from the states of each lane alone."""
    length = lane_words
    while len(states) > 1:
        if len(states) % 2:
            states = np.concatenate([np.zeros(1, np.uint32), states])
        states = _append_zeros(length)(states[0::2]) ^ states[1::2]
        length *= 2
    return int(states[0])


def _crc32c_short(content: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in content:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (_POLYNOMIAL if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def masked(content: bytes) -> int:
    """Return the checksum in the form LevelDB stores (a checksum of data that holds checksums is weak)."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF
