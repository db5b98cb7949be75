"""A state as tensors and the rest, and the tensors' bytes as pieces that several workers can send at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.checkpoints.plain import like_mapping, like_sequence
from poseidon.team.tensors import in_a_row

PIECE_BYTES = 4 << 20

Description = list[tuple[str, list[int]]]
"""For each tensor its type and shape; plain data."""


@dataclass(frozen=True)
class StatePiece:
    """A part of one tensor's bytes."""

    number: int
    """Among all pieces."""
    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.stop - self.start


def lift(state: Any) -> tuple[Any, list[Tensor]]:
    """Return a state with empty tensors, and its tensors in their order; unusual ones stay in the state."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return torch.empty(0, dtype=tensor.dtype, device="cpu")

    return _exchange(state, take), tensors


def lower(state: Any, tensors: Sequence[Tensor]) -> Any:
    """Undo :func:`lift`."""
    left: Iterator[Tensor] = iter(tensors)
    return _exchange(state, lambda _: next(left))


def describe_tensors(tensors: Sequence[Tensor]) -> Description:
    """Return what another worker must know to make room for these tensors."""
    return [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]


def cut(description: Description) -> list[StatePiece]:
    """Return the pieces of tensors, the same on all workers."""
    pieces: list[StatePiece] = []
    for number, (dtype, shape) in enumerate(description):
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        for start in range(0, size, PIECE_BYTES):
            pieces.append(StatePiece(len(pieces), number, start, min(start + PIECE_BYTES, size)))
    return pieces


def flatten(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors' bytes, each as one row on its device; without a copy where they lie in order."""
    return [in_a_row(tensor).view(torch.uint8) for tensor in tensors]


def make_room(description: Description) -> list[Tensor]:
    """Return rows of bytes in host memory for tensors like these."""
    return [
        torch.empty(math.prod(shape) * getattr(torch, dtype).itemsize, dtype=torch.uint8, device="cpu")
        for dtype, shape in description
    ]


def shape_rows(rows: Sequence[Tensor], description: Description) -> list[Tensor]:
    """Return rows of bytes as tensors, in the same memory."""
    return [
        row.view(getattr(torch, dtype)).reshape(shape) for row, (dtype, shape) in zip(rows, description, strict=True)
    ]


def view_of(rows: Sequence[Tensor], piece: StatePiece) -> memoryview:
    """Return a piece's bytes in host memory: those of the rows, or a copy if they are on a device."""
    row = rows[piece.tensor][piece.start : piece.stop]
    return row.cpu().numpy().data


def _exchange(value: Any, change: Any) -> Any:
    """Return plain data with other tensors; the order of the calls depends on the structure alone."""
    if isinstance(value, Tensor):
        return change(value) if _is_plain(value) else value
    if isinstance(value, Mapping):
        return like_mapping(value, {key: _exchange(item, change) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return like_sequence(value, [_exchange(item, change) for item in value])
    return value


def _is_plain(tensor: Tensor) -> bool:
    is_known = type(tensor) in (Tensor, nn.Parameter)
    return (
        is_known and tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
