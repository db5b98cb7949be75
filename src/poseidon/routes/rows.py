"""Step 3, rows: an embedding's gradient travels as the rows that this step touched.

The engine lets autograd make a sparse gradient, so a full one never exists before the exchange. Each worker sums its
own duplicates first; then every worker adds all rows in rank order. Rows of one worker are distinct, so no two
additions of one call hit the same row and the result does not depend on the device's order.

An optimizer that wants a full gradient gets one that is zero but for those rows. In host memory, it lies in memory of
an earlier step: the system takes many times as long to map so many fresh pages as it takes to clear these. They are
cleared while the rows travel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import accumulate

import torch
from torch import Tensor, nn

from poseidon.planning.shipments import SLOW_BYTES_PER_S
from poseidon.routes.allreduce import average_now
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, Flag, LiveItem, LiveUnit
from poseidon.routes.parcels import Gathered, Parcel
from poseidon.routes.shortening import find_repeats
from poseidon.sums.events import record
from poseidon.team.team import Team
from poseidon.wire.pool import Pool

_INDEX_BYTES, _WHICH_BYTES = 8, 4
_COUNT_SHIFT, _COUNT_BITS = 8, 27
"""Where a parcel's word of flags has the number of rows and of those that travel, 134 million at most."""
_WIDE = torch.float32


class RowsExchanger(Exchanger):
    """Exchanges the touched rows of embedding units; calls may come in any order."""

    def __init__(self, context: Context) -> None:
        self._team = context.team
        self._pairs = context.pairs
        self._is_slow = context.cluster.between.bytes_per_s <= SLOW_BYTES_PER_S
        self._room = Pool(0)

    def prepare(self, items: Sequence[LiveItem]) -> None:
        """Make room for the full gradients."""
        weights = [item.unit.weight for item in items if not item.unit.spec.is_sparse]
        # A pool rounds sizes up by a quarter at most.
        self._room = Pool(sum(weight.nbytes for weight in weights) * 5 // 4) if weights else self._room

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        """Send the touched rows; a sparse ``.grad`` is None until the exchange is finished."""
        unit = item.unit
        gradient = unit.weight.grad
        flags = Flag(0)
        if gradient is not None and not gradient.is_sparse:
            # The table was also used in a way that makes a full gradient; an allreduce averages that part later.
            flags, gradient = Flag.HAS_DENSE, None
        else:
            unit.weight.grad = None
        exchange = _RowsExchange(self._team, unit, brought[0], flags, self._room)
        part, *counts = _pack(unit.weight, gradient, self._is_slow and _repeats_rows(unit))
        host, settle = _to_host(part)
        rows, word = host.view(-1, 1), _to_word(flags, *counts)
        clear = None if unit.spec.is_sparse or unit.weight.is_cuda else exchange.clear_room
        parcel = Parcel(unit.index, unit.name, step, rows, word, settle, None, item.item.shipment, clear)
        exchange.future = self._pairs.start(parcel)
        return exchange


class _RowsExchange(Exchange):
    future: Future[Gathered]

    def __init__(self, team: Team, unit: LiveUnit, brought: Brought, flags: Flag, room: Pool) -> None:
        self.flags = flags
        self._team = team
        self._unit = unit
        self._brought = brought
        self._room = room
        self._cleared: Tensor | None = None
        self._is_landing = False
        self._lock = threading.Lock()

    def clear_room(self) -> None:
        """Make the zeros to which the rows will be added, if they are likely to be needed."""
        unit = self._unit
        with self._lock:
            if not (self.flags or self._is_landing) and self._brought.kept is None:
                self._cleared = _zeros_like(unit.weight, self._room)

    def _take_room(self) -> Tensor:
        """Return zeros: those made before, if they were, else new ones."""
        cleared, self._cleared = self._cleared, None
        return _zeros_like(self._unit.weight, self._room) if cleared is None else cleared

    def finish(self, is_used: bool) -> None:
        gathered = self._team.result(self.future, self._unit.name, grace_s=0)
        unit, brought = self._unit, self._brought
        with self._lock:  # until they are cleared, if that is under way
            self._is_landing = True
        if not is_used:
            self._cleared = None
            if not unit.spec.is_sparse:
                unit.weight.grad, brought.kept = brought.kept, None
            return
        # All at once: a copy to the device for every worker takes longer than what it copies.
        data = gathered.rows.view(-1).to(unit.weight.device, non_blocking=True).split(gathered.counts)
        parts = [_unpack(unit.weight, part, *_from_word(word)) for part, word in zip(data, gathered.flags, strict=True)]
        has_dense = any(flags & Flag.HAS_DENSE for flags in gathered.flags)
        if unit.spec.is_sparse and not has_dense:
            unit.weight.grad = _sparse_mean(unit.weight, parts)
            return
        if has_dense:
            average_now(self._team, (unit.weight,), unit.name)
        total = unit.weight.grad
        if brought.kept is not None:
            total = brought.kept if total is None else brought.kept.add_(total)
            brought.kept = None
        if total is None:
            total = self._take_room()
        if total.dtype.itemsize < _WIDE.itemsize:
            indices, means = _means(parts)
            total.index_add_(0, indices, means.to(total.dtype))
        else:
            for indices, values in parts:
                total.index_add_(0, indices, values, alpha=1 / self._team.size)
        unit.weight.grad = total


def _repeats_rows(unit: LiveUnit) -> bool:
    """Return whether many rows of the unit's gradient may be equal: a bag gives all its rows the same one."""
    module = unit.module
    return isinstance(module, nn.EmbeddingBag) and module.mode != "max" and not unit.weight.is_cuda


def _means(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the touched rows' numbers and means; added in float32, so that short types are rounded only once."""
    touched, places = torch.unique(torch.cat([indices for indices, _ in parts]), return_inverse=True)
    sums = torch.zeros(touched.numel(), parts[0][1].shape[1], dtype=_WIDE, device=touched.device)
    for (_, values), where in zip(parts, places.split([len(indices) for indices, _ in parts]), strict=True):
        sums.index_add_(0, where, values.to(_WIDE))
    return touched, sums / len(parts)


def _zeros_like(weight: Tensor, room: Pool) -> Tensor:
    """Return zeros; in host memory from ``room``, which gets it back when nothing refers to it any more."""
    if weight.is_cuda or not weight.numel():
        return torch.zeros_like(weight)
    return torch.frombuffer(room.lend(weight.nbytes), dtype=weight.dtype).view(weight.shape).zero_()


def _pack(weight: Tensor, gradient: Tensor | None, shorten: bool) -> tuple[Tensor, int, int]:
    """Return a part of bytes with the touched rows, their number, and the number of those that travel.

    A part holds the rows' numbers in the table, then the rows; or the distinct rows, and which one of them each is.
    """
    if gradient is None:
        return torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0
    gradient = gradient.coalesce()
    indices, values = gradient.indices()[0], gradient.values()
    fields = [indices, values]
    if shorten and (repeats := find_repeats(values)) is not None:
        fields = [indices, *repeats]
    counts = len(indices), len(fields[1])
    ends = _ends(weight, *counts)
    part = torch.zeros(ends[-1], dtype=torch.uint8, device=weight.device)
    for start, field in zip((0, *ends), fields, strict=False):
        data = field.contiguous().view(torch.uint8).view(-1)
        part[start : start + len(data)] = data
    return part, *counts


def _ends(weight: Tensor, count: int, distinct: int) -> tuple[int, ...]:
    """Return where the fields of a part end; aligned, so that every field can be read in place."""
    sizes = [count * _INDEX_BYTES, distinct * weight.shape[1] * weight.element_size()]
    if distinct < count:
        sizes.append(count * _WHICH_BYTES)
    return tuple(accumulate(-(-size // _INDEX_BYTES) * _INDEX_BYTES for size in sizes))


def _unpack(weight: Tensor, part: Tensor, count: int, distinct: int) -> tuple[Tensor, Tensor]:
    """Return the numbers and the values of the rows in a part."""
    ends = _ends(weight, count, distinct)
    indices = part[: ends[0]].view(torch.int64)
    width = weight.shape[1]
    values = part[ends[0] : ends[1]].view(weight.dtype)[: distinct * width].view(distinct, width)
    if distinct < count:
        values = values.index_select(0, part[ends[1] : ends[2]].view(torch.int32)[:count])
    return indices, values


def _to_word(flags: Flag, count: int, distinct: int) -> int:
    return flags | distinct << _COUNT_SHIFT | count << _COUNT_SHIFT + _COUNT_BITS


def _from_word(word: int) -> tuple[int, int]:
    return word >> _COUNT_SHIFT + _COUNT_BITS, word >> _COUNT_SHIFT & (1 << _COUNT_BITS) - 1


def _to_host(rows: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Copy rows to host memory; the returned function, if any, waits until they are there."""
    if not rows.is_cuda:
        return rows, None
    host = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
    host.copy_(rows, non_blocking=True)
    return host, record(torch.cuda.current_stream(rows.device)).synchronize


def _sparse_mean(weight: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    indices = torch.cat([indices for indices, _ in parts]).unsqueeze(0)
    values = torch.cat([values for _, values in parts]) / len(parts)
    return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False).coalesce()
