"""Sums over the workers of one machine, in memory that they share.

Every worker adds up all parts itself, in rank order, so all get the same bits and nobody waits for another worker's
arithmetic. No thread takes part: a bucket is written and posted when it starts, and added up by whoever needs it. So it
suits steps whose buckets are small; ``levels.py`` divides the work of larger ones, on a thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.routes.base import Exchange
from poseidon.team.board import ALIGNMENT, Board
from poseidon.team.team import Team

LARGEST_STEP_BYTES = 4 << 20
"""In buckets of one step that travel this way..."""
LARGEST_READ_BYTES = 16 << 20
"""... and in all workers' parts of them, which each worker reads."""

_HALVES = (torch.float16, torch.bfloat16)


def suits_local_sums(step_bytes: int, workers: int) -> bool:
    """Return whether the buckets of a step are small enough."""
    return step_bytes <= LARGEST_STEP_BYTES and step_bytes * workers <= LARGEST_READ_BYTES


def padded(size_bytes: int) -> int:
    """Return the room that a bucket takes."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def add_parts(parts: Sequence[Tensor], out: Tensor, divisor: int) -> None:
    """Write the sum of ``parts``, added from left to right and then divided, to ``out``.

    Half precision is added in float32 and rounded once.
    """
    first, *others = parts
    if out.dtype in _HALVES:
        total = first.float()
        for part in others:
            total += part
        if divisor != 1:
            total /= divisor
        out.copy_(total)
        return
    torch.add(first, others[0], out=out)
    for part in others[1:]:
        out += part
    if divisor != 1:
        out /= divisor


class LocalSums:
    """Averages the buckets of a step over a board; its calls come in the same order on all workers.

    A board has two halves, used by every other step. A worker writes to one when it has finished the last step, and so
    has seen posts that the others made when they had finished the step before it, which used the same half.
    """

    def __init__(self, team: Team, board: Board) -> None:
        self._team = team
        self._board = board
        self._half_bytes = board.strip_bytes // 2
        self._step: int | None = None
        self._half = 0
        self._used_bytes = 0
        self._under_way = 0

    def start(self, flat: Tensor, name: str, step: int) -> Exchange | None:
        """Replace ``flat`` by its mean over the workers; None if there is no room for it in this step."""
        if step != self._step:
            assert not self._under_way, f"step {step} began while {self._under_way} buckets of the last are under way"
            self._step, self._half, self._used_bytes = step, self._half ^ 1, 0
        size, start = padded(flat.numel() * flat.element_size()), self._used_bytes
        if start + size > self._half_bytes:
            return None
        self._used_bytes += size
        parts = self._board.parts(self._half * self._half_bytes + start, flat.numel(), flat.dtype)
        parts[self._board.place].copy_(flat.detach())
        self._under_way += 1
        return _LocalExchange(self, parts, flat, self._board.post(), name)

    def finish(self, parts: Sequence[Tensor], flat: Tensor, number: int, name: str, is_used: bool) -> None:
        """Wait for the others' parts and add them up."""
        self._board.wait(number, name)
        if is_used:
            add_parts(parts, flat, self._team.size)
        self._under_way -= 1

    def close(self) -> None:
        """Close the board."""
        self._board.close()


class _LocalExchange(Exchange):
    def __init__(self, sums: LocalSums, parts: Sequence[Tensor], flat: Tensor, number: int, name: str) -> None:
        self._sums = sums
        self._parts = parts
        self._flat = flat
        self._number = number
        self._name = name

    def finish(self, is_used: bool) -> None:
        self._sums.finish(self._parts, self._flat, self._number, self._name, is_used)
