"""The weights and the optimizer state of the chunks that one worker owns, where owners take the step.

A chunk may span several parameters and hold a part of each: its *pieces*. The user's optimizer steps pieces as it would
step parameters, so they are parameters themselves, flat ones. Where workers get exact weights, a piece lies in the
model's own memory; where they get rounded ones, the exact values are kept here.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.errors import UnsupportedError
from poseidon.routes.base import LiveItem
from poseidon.sums.chunks import Chunk
from poseidon.sums.means import bytes_of
from poseidon.sums.slots import Slot
from poseidon.sums.touched import chunk_span, read_numbers
from poseidon.team.tensors import in_a_row

State = dict[Any, dict[str, Any]]
"""An optimizer's state, by parameter or piece."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of one parameter's values in one owned chunk."""

    parameter: nn.Parameter
    start: int
    stop: int
    """In the parameter, in the order of its memory."""
    at: int
    """Where it begins in the chunk."""
    held: nn.Parameter
    """What the optimizer steps."""

    @property
    def length(self) -> int:
        """Number of values."""
        return self.stop - self.start

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this piece of a tensor that is like the parameter."""
        return flatten(tensor, self.parameter)[self.start : self.stop]


@dataclass(frozen=True, eq=False)
class Order:
    """One call of ``step()`` on the owner."""

    update: Callable[[Sequence[Piece], State], None] | None
    """Steps the user's optimizer on pieces whose gradients are set; None: leave the weights as they are."""
    in_hand: Mapping[Piece, Tensor | None]
    """Gradients that the user has seen, and may have changed, instead of the means; None: no gradient."""
    scale: Tensor | None = None
    """Multiplies the means, to clip them."""
    weights: Mapping[Piece, Tensor] = field(default_factory=dict)
    """Weights that the user has seen, and may have changed, instead of those kept here..."""
    state: Mapping[Piece, Mapping[str, Any]] | None = None
    """... and so the whole optimizer state; None: nobody has."""
    ready: torch.cuda.Event | None = None
    """On a CUDA device: when the model's computation no longer needs the old weights."""


class Shard:
    """What one rank owns of a model; a :class:`~poseidon.sums.stepping.Stepper`."""

    def __init__(self, items: Iterable[tuple[LiveItem, Slot]], rank: int, rounded: AbstractSet[nn.Parameter]) -> None:
        self._rounded = rounded
        self._pieces: dict[tuple[int, int], list[Piece]] = {}
        self.state: State = defaultdict(dict)
        for item, slot in items:
            for chunk in slot.chunks:
                if chunk.owner == rank:
                    self._pieces[chunk.slot, chunk.index] = [*self._cut(item, chunk)]
        self._exact_chunks: set[Chunk] = set()
        """Of rounded parameters, but sent exactly."""

    def _cut(self, item: LiveItem, chunk: Chunk) -> Iterable[Piece]:
        begin = 0
        for parameter in item.parameters:
            end = begin + parameter.numel()
            first, last = max(begin, chunk.start), min(end, chunk.stop)
            if first < last:
                values = flat_memory(parameter)[first - begin : last - begin]
                # With versions of its own: stepping it must not count as a change of the parameter on its owner only.
                held = nn.Parameter(values.clone() if parameter in self._rounded else values.data)
                yield Piece(parameter, first - begin, last - begin, first - chunk.start, held)
            begin = end

    @property
    def pieces(self) -> list[Piece]:
        """All pieces."""
        return [*itertools.chain.from_iterable(self._pieces.values())]

    def pieces_of(self, chunk: Chunk) -> list[Piece]:
        """Return the pieces of an owned chunk."""
        return self._pieces[chunk.slot, chunk.index]

    # The stepper.

    def changes(self, order: Order) -> bool:
        """Return whether an order changes weights or state."""
        return order.update is not None

    def keep(self, chunk: Chunk) -> Tensor | None:
        """Return a copy of the exact weights, if this is the only place that has them."""
        pieces = self.pieces_of(chunk)
        if pieces[0].parameter not in self._rounded:
            return None
        return torch.cat([piece.held.detach() for piece in pieces])

    def begin(self, chunks: Sequence[Chunk], order: Order) -> None:
        """Make the device wait for the model's computation, and take what the user has changed.

        Not sooner: a slower worker may still look at what was here before.
        """
        if order.ready is not None:
            torch.cuda.current_stream(self.pieces_of(chunks[0])[0].held.device).wait_event(order.ready)
        for piece in itertools.chain.from_iterable(self.pieces_of(chunk) for chunk in chunks):
            if piece in order.weights:
                piece.held.detach().copy_(order.weights[piece])
            if order.state is not None:
                self.state.pop(piece.held, None)
                if piece in order.state:
                    self.state[piece.held] = dict(order.state[piece])

    def step(self, means: Sequence[tuple[Chunk, Tensor]], order: Order) -> None:
        """Update the weights of some chunks."""
        if order.update is None:
            return
        pieces: list[Piece] = []
        for chunk, mean in means:
            mine = self.pieces_of(chunk)
            device = mine[0].held.device
            # A copy: some optimizers write into gradients, and a slower worker may still look at the mean.
            gradient = mean.to(device, copy=True)
            if order.scale is not None:
                gradient *= order.scale.to(device)
            for piece in mine:
                own = gradient[piece.at : piece.at + piece.length]
                piece.held.grad = order.in_hand.get(piece, own)
            pieces += mine
        try:
            order.update(pieces, self.state)
        finally:
            for piece in pieces:
                piece.held.grad = None

    def outgoing(self, chunk: Chunk) -> Tensor:
        """Return the new weights, rounded to bf16 where that is all that workers use."""
        weights = torch.cat([piece.held.detach() for piece in self.pieces_of(chunk)])
        if self.rounds(chunk):
            weights = weights.to(torch.bfloat16).to(weights.dtype)
        return weights

    def rounds(self, chunk: Chunk) -> bool:
        """Return whether workers get the chunk's weights rounded."""
        return self.pieces_of(chunk)[0].parameter in self._rounded and chunk not in self._exact_chunks

    def stop_rounding(self, chunk: Chunk) -> None:
        """Send exact weights from the next step on."""
        self._exact_chunks.add(chunk)

    def exact(self, chunk: Chunk) -> memoryview:
        """Return the exact weights."""
        return bytes_of(torch.cat([piece.held.detach() for piece in self.pieces_of(chunk)]))

    def rows_of(self, chunk: Chunk, details: memoryview, earlier: Tensor | None) -> memoryview:
        """Return rows of a chunk that lies in one table, from the weights, or from ``earlier`` ones."""
        pieces = self.pieces_of(chunk)
        width = pieces[0].parameter.shape[1]
        weights = torch.cat([piece.held.detach() for piece in pieces]) if earlier is None else earlier
        count, skipped = chunk_span(chunk, width)
        table = weights.new_zeros(count * width)
        table[skipped : skipped + chunk.length] = weights
        numbers = torch.from_numpy(read_numbers(details, chunk, width).copy()).to(table.device)
        return bytes_of(table.view(count, width)[numbers].view(-1))

    def state_of(self, chunk: Chunk) -> memoryview:
        """Return the optimizer's state of a chunk, as :func:`read_state` takes it."""
        return memoryview(write_state([(piece, self.state.get(piece.held, {})) for piece in self.pieces_of(chunk)]))

    # What the user has changed.

    def weights_in_hand(self, parameters: AbstractSet[nn.Parameter]) -> dict[Piece, Tensor]:
        """Return the values that the model has of the pieces of ``parameters``, unless a piece lies in its memory."""
        found: dict[Piece, Tensor] = {}
        for piece in self.pieces:
            if piece.parameter in parameters:
                own = flat_memory(piece.parameter)[piece.start : piece.stop]
                if piece.parameter in self._rounded:
                    found[piece] = own.clone()
                elif piece.held.data_ptr() != own.data_ptr():  # the user has given the parameter other memory
                    piece.held.data = own
        return found

    def state_in_hand(self, full: Mapping[Any, Mapping[str, Any]]) -> dict[Piece, dict[str, Any]]:
        """Return the pieces of the state that the user's optimizer has."""
        return {
            piece: {key: _cut_value(piece, value) for key, value in entry.items()}
            for piece in self.pieces
            if (entry := full.get(piece.parameter))
        }


def _cut_value(piece: Piece, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (piece.cut(value) if value.shape == piece.parameter.shape else value).detach().clone()


def flat_memory(parameter: Tensor) -> Tensor:
    """Return a flat view of the memory of a parameter that :func:`has_no_gaps`."""
    plain = parameter.detach()
    if plain.is_contiguous():
        return in_a_row(plain)
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def flatten(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor's values in the order that ``like`` has in memory."""
    if like.is_contiguous():
        return in_a_row(tensor)
    copied = torch.empty_like(like.detach(), dtype=tensor.dtype, device=tensor.device)
    return flat_memory(copied.copy_(tensor.detach()))


def layout_of(tensor: Tensor) -> tuple[torch.dtype, torch.device, list[int]]:
    """Return what must not change while owners keep pieces: where values lie in memory, and of which kind they are."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.dtype, tensor.device, strides


def has_no_gaps(tensor: Tensor) -> bool:
    """Return whether a tensor's values lie side by side, in whatever order."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


# State on the wire: what it is, as JSON, and then the tensors.

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def check_state(entries: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> None:
    """Raise unless states are made of one value for each of a tensor's, or of single ones: pieces then make a whole."""
    for like, entry in entries:
        for key, value in entry.items():
            if isinstance(value, Tensor):
                fits = (value.shape == like.shape or value.numel() == 1) and str(value.dtype) in _DTYPES
                what = (
                    f"a tensor of {value.dtype}, of shape {tuple(value.shape)}, for values of shape {tuple(like.shape)}"
                )
            else:
                fits = value is None or isinstance(value, bool | int | float | str)
                what = f"a {type(value).__name__}"
            if not fits:
                raise UnsupportedError(
                    f'the optimizer keeps {key!r} in its state, {what}. With update="server" owners step parts of '
                    "parameters and keep the state of these: tensors of the parameter's own shape, and single numbers. "
                    "Keep several such tensors instead, or leave update out"
                )


def write_state(entries: Sequence[tuple[Piece, Mapping[str, Any]]]) -> bytes:
    """Return the state of some pieces as bytes."""
    heads: list[dict[str, Any]] = []
    tensors: list[bytes] = []
    for piece, entry in entries:
        head: dict[str, Any] = {}
        for key, value in entry.items():
            if isinstance(value, Tensor):
                is_like = value.shape == piece.held.shape
                on_host = value.device.type == "cpu"
                head[key] = [str(value.dtype), None if is_like else list(value.shape), on_host]
                tensors.append(bytes(bytes_of(in_a_row(value))))
            else:
                head[key] = value
        heads.append(head)
    text = json.dumps(heads).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *tensors])


def read_state(view: memoryview, pieces: Sequence[tuple[nn.Parameter, int, int]], full: State) -> None:
    """Put what :func:`write_state` returned into the state of whole parameters; pieces as (parameter, start, stop)."""
    at = 8 + int.from_bytes(view[:8], "little")
    for (parameter, start, stop), head in zip(pieces, json.loads(bytes(view[8:at])), strict=True):
        if not head:
            continue
        entry = full[parameter]
        for key, what in head.items():
            if not isinstance(what, list):
                entry[key] = what
                continue
            name, shape, on_host = what
            dtype = _DTYPES[name]
            count = stop - start if shape is None else _count(shape)
            size = count * dtype.itemsize
            values = (
                torch.frombuffer(bytearray(view[at : at + size]), dtype=dtype) if size else torch.empty(0, device="cpu")
            )
            at += size
            device = torch.device("cpu") if on_host else parameter.device
            if shape is not None:
                entry[key] = values.reshape(shape).to(device)
                continue
            if start == 0:
                entry[key] = torch.empty_like(parameter.detach(), dtype=dtype, device=device)
            flat_memory(entry[key])[start:stop] = values.to(device)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
