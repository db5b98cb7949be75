"""Step 3, factors: a linear layer's gradient travels as the two matrices whose product it is.

The gradient of an M x N weight over K rows of input is ``G^T X`` with G (K x M) the gradient of the layer's output and
X (K x N) its input. Sufficient factor broadcasting sends X and G, K (M + N) values, to all workers; each worker stacks
all rows in rank order and multiplies once. Every worker multiplies the same bytes in the same layout, so the results
agree bit for bit on equal hardware. The bias gradient is the column sum of G and costs nothing extra on the wire.

Factors travel in the type in which the layer computed, which autocast makes a short one; every worker says which. The
product is in float32 at least, and rounded once if the parameter is shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from poseidon.planning.shipments import SLOW_BYTES_PER_S
from poseidon.routes.allreduce import average_now
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, FactorPair, Flag, LiveItem, LiveUnit
from poseidon.routes.parcels import Gathered, Parcel
from poseidon.routes.room import count_filled
from poseidon.team.team import Team

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Types of factors, by their number in a parcel's word of flags, above the flags themselves."""
_DTYPE_SHIFT = 8
_SHORT = (torch.float16, torch.bfloat16) if torch.version.cuda and hasattr(torch.ops.aten.mm, "dtype") else ()
"""Types whose products a CUDA device can return in float32."""


class FactorsExchanger(Exchanger):
    """Exchanges the factors of linear units; calls may come in any order."""

    def __init__(self, context: Context) -> None:
        self._team = context.team
        self._pairs = context.pairs
        self._is_slow = context.cluster.crossing.bytes_per_s <= SLOW_BYTES_PER_S
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(
        self, item: LiveItem, brought: Sequence[Brought], step: int, counts_values: bool = False
    ) -> FactorsExchange:
        """Send this worker's factors; they are freed once sent. ``counts_values``: of those that come."""
        unit, mine = item.unit, brought[0]
        pieces = mine.take_pieces()
        dtype = row_dtype(unit, pieces)
        shape = (count_rows(pieces), sum(unit.weight.shape))
        host = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=unit.weight.is_cuda)
        exchange = FactorsExchange(self._team, unit, self._side_stream(unit.weight), counts_values)
        settle = exchange.fill(host, pieces)
        exchange.flags = Flag.HAS_DENSE if mine.has_dense else Flag(0)
        word = exchange.flags | _DTYPES.index(dtype) << _DTYPE_SHIFT
        # Counted in bytes, because workers may bring rows of different types.
        rows = host.view(torch.uint8).view(-1, 1)
        parcel = Parcel(
            unit.index,
            unit.name,
            step,
            rows,
            word,
            settle,
            exchange.land,
            item.item.shipment,
            itemsize=dtype.itemsize if self._is_slow else 0,
        )
        exchange.future = self._pairs.start(parcel)
        return exchange

    def _side_stream(self, weight: Tensor) -> torch.cuda.Stream | None:
        if not weight.is_cuda:
            return None
        if weight.device not in self._streams:
            self._streams[weight.device] = torch.cuda.Stream(weight.device)
        return self._streams[weight.device]


@dataclass(frozen=True)
class Factors:
    """What all workers brought for one unit."""

    rows: Tensor
    """Rows (X | G) in rank order, in a type that holds every worker's."""
    counts: tuple[int, ...]
    """Rows per rank."""
    has_dense: bool
    """Whether some worker has a full gradient too."""
    values: int = 0
    """The most values of any worker that are not zero, if they were counted."""

    @classmethod
    def of(cls, gathered: Gathered, unit: LiveUnit, counts_values: bool = False) -> Factors:
        """Read what arrived; without a copy, if all rows have one type."""
        width = sum(unit.weight.shape)
        dtypes = [_DTYPES[word >> _DTYPE_SHIFT] for word in gathered.flags]
        counts = [size // (width * dtype.itemsize) for size, dtype in zip(gathered.counts, dtypes, strict=True)]
        present = {dtype for dtype, count in zip(dtypes, counts, strict=True) if count}
        dtype = reduce(torch.promote_types, present) if present else unit.weight.dtype
        data = gathered.rows.view(-1)
        if len(present) > 1:
            parts = zip(data.split(gathered.counts), dtypes, strict=True)
            # Copied first: a part may begin where its type cannot be read.
            data = torch.cat([part.clone().view(each).to(dtype) for part, each in parts])
        has_dense = any(word & Flag.HAS_DENSE for word in gathered.flags)
        rows = data.view(dtype).view(-1, width)
        values = max(int(count_filled(part)) for part in rows.split(counts)) if counts_values else 0
        return cls(rows, tuple(counts), has_dense, values)


class FactorsExchange(Exchange):
    """On CUDA, copies and rebuilding run on a side stream while the compute stream continues with backward."""

    future: Future[tuple[Factors, list[Tensor], torch.cuda.Event | None]]

    def __init__(self, team: Team, unit: LiveUnit, side: torch.cuda.Stream | None, counts_values: bool = False) -> None:
        self._team = team
        self._unit = unit
        self._side = side
        self._counts_values = counts_values

    def fill(self, host: Tensor, pieces: Sequence[FactorPair]) -> Callable[[], None] | None:
        """Copy the factors side by side into rows (X | G); the returned function, if any, waits for the copy."""
        if self._side is None:
            fill_rows(host, pieces)
            return None
        # Joined on the device first: a copy into part of a row would synchronize with the device. On the stream that
        # computes: with updates that are deferred, nothing else keeps it from changing its input before that.
        rows = torch.empty_like(host, device=self._side.device)
        fill_rows(rows, pieces)
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            host.copy_(rows, non_blocking=True)
            rows.record_stream(self._side)
            # The wait must not spin: the network needs the cores.
            done = torch.cuda.Event(blocking=True)
            done.record(self._side)
        return done.synchronize

    def land(self, gathered: Gathered) -> tuple[Factors, list[Tensor], torch.cuda.Event | None]:
        """Rebuild the mean gradients on the side stream. On the CPU, :meth:`finish` does it: see there."""
        factors = Factors.of(gathered, self._unit, self._counts_values)
        if self._side is None:
            return factors, [], None
        with torch.cuda.device(self._side.device), torch.cuda.stream(self._side):
            rows = factors.rows.to(self._side.device, non_blocking=True)
            gradients = rebuild(self._team, self._unit, rows)
            done = torch.cuda.Event()
            done.record(self._side)
        # Their memory is free for others.
        return replace(factors, rows=factors.rows.new_empty(0)), gradients, done

    def finish(self, is_used: bool) -> None:
        """Add the mean gradients to ``.grad``."""
        self.finish_factors(is_used)

    def finish_factors(self, is_used: bool) -> Factors:
        """Do the same, and return what all workers brought."""
        factors, gradients, done = self._team.result(self.future, self._unit.name)
        unit = self._unit
        if not is_used:
            return factors
        if factors.has_dense:
            average_now(self._team, unit.parameters, unit.name)
        if self._side is None:
            # On this thread, not the receiving one, where BLAS may have other thread settings.
            gradients = rebuild(self._team, unit, factors.rows)
        else:
            assert done is not None
            current = torch.cuda.current_stream(self._side.device)
            current.wait_event(done)
            for tensor in gradients:
                tensor.record_stream(current)
        add_gradients(unit, gradients)
        return factors


def row_dtype(unit: LiveUnit, pieces: Sequence[FactorPair]) -> torch.dtype:
    """Return the dtype in which rows of factors travel: the shortest that holds all of them."""
    dtypes = {tensor.dtype for piece in pieces for tensor in piece}
    return reduce(torch.promote_types, dtypes) if dtypes else unit.weight.dtype


def count_rows(pieces: Sequence[FactorPair]) -> int:
    """Return how many rows the factors of some calls have together."""
    return sum(x.shape[0] for x, _ in pieces)


def fill_rows(rows: Tensor, pieces: Sequence[FactorPair]) -> None:
    """Write the factors side by side into rows (X | G)."""
    start = 0
    for x, g in pieces:
        part = rows[start : start + x.shape[0]]
        part[:, : x.shape[1]] = x
        part[:, x.shape[1] :] = g
        start += x.shape[0]


def rebuild(team: Team, unit: LiveUnit, rows: Tensor) -> list[Tensor]:
    """Return the mean gradients of the unit's parameters, given all workers' rows (X | G)."""
    inputs, scale = unit.weight.shape[1], 1 / team.size
    dtype = torch.promote_types(unit.weight.dtype, torch.float32)
    x, g = rows[:, :inputs], rows[:, inputs:]
    of_outputs = x if unit.is_transposed else g
    if rows.is_cuda and rows.dtype in _SHORT and dtype is torch.float32 and rows.shape[0]:
        # Products of short values fit float32, in which the device's matrix units add them.
        product = torch.mm(g.t(), x, out_dtype=dtype).mul_(scale)
    else:
        # Scaling the narrow factor is cheaper than scaling the product.
        product = (g.to(dtype) * scale).t() @ x.to(dtype)
    gradients = [product, of_outputs.sum(0, dtype=dtype).mul_(scale)]
    return [gradient.to(parameter.dtype) for parameter, gradient in zip(unit.parameters, gradients, strict=False)]


def add_gradients(unit: LiveUnit, gradients: Sequence[Tensor]) -> None:
    """Add to ``.grad`` of the unit's parameters, in their order."""
    for parameter, gradient in zip(unit.parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
