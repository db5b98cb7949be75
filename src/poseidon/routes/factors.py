"""Step 3, factors: a linear layer's gradient travels as the two matrices whose product it is.

The gradient of an M x N weight over K rows of input is ``G^T X`` with G (K x M) the gradient of the layer's output and
X (K x N) its input. Sufficient factor broadcasting sends X and G, K (M + N) values, to all workers; each worker stacks
all rows in rank order and multiplies once. Every worker multiplies the same bytes in the same layout, so the results
agree bit for bit on equal hardware. The bias gradient is the column sum of G and costs nothing extra on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from poseidon.routes.allreduce import average_now
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, FactorPair, Flag, LiveItem, LiveUnit
from poseidon.routes.pairs import Gathered, Parcel
from poseidon.team.team import Team


class FactorsExchanger(Exchanger):
    """Exchanges the factors of linear units; calls may come in any order."""

    def __init__(self, context: Context) -> None:
        self._team = context.team
        self._pairs = context.pairs
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        """Send this worker's factors; they are freed once sent."""
        unit, mine = item.unit, brought[0]
        pieces, dtype = mine.take_pieces(), row_dtype(unit, mine)
        outputs, inputs = unit.weight.shape
        count = sum(x.shape[0] for x, _ in pieces)
        host = torch.empty(count, inputs + outputs, dtype=dtype, device="cpu", pin_memory=unit.weight.is_cuda)
        exchange = _FactorsExchange(self._team, unit, dtype, self._side_stream(unit.weight))
        settle = exchange.fill(host, pieces)
        exchange.flags = Flag.HAS_DENSE if mine.has_dense else Flag(0)
        rows = host.view(torch.uint8)
        parcel = Parcel(unit.index, unit.name, step, rows, exchange.flags, settle, exchange.land, item.item.shipment)
        exchange.future = self._pairs.start(parcel)
        return exchange

    def _side_stream(self, weight: Tensor) -> torch.cuda.Stream | None:
        if not weight.is_cuda:
            return None
        if weight.device not in self._streams:
            self._streams[weight.device] = torch.cuda.Stream(weight.device)
        return self._streams[weight.device]


class _FactorsExchange(Exchange):
    """On CUDA, copies and rebuilding run on a side stream while the compute stream continues with backward."""

    future: Future[Any]

    def __init__(self, team: Team, unit: LiveUnit, dtype: torch.dtype, side: torch.cuda.Stream | None) -> None:
        self._team = team
        self._unit = unit
        self._dtype = dtype
        self._side = side

    def fill(self, host: Tensor, pieces: Sequence[FactorPair]) -> Callable[[], None] | None:
        """Copy the factors side by side into rows (X | G); the returned function, if any, waits for the copy."""
        if self._side is None:
            fill_rows(host, pieces)
            return None
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            # Joined on the device first: a copy into part of a row would synchronize with the device.
            rows = torch.empty_like(host, device=self._side.device)
            fill_rows(rows, pieces)
            host.copy_(rows, non_blocking=True)
            for tensor in (tensor for piece in pieces for tensor in piece):
                tensor.record_stream(self._side)
            # The wait must not spin: the network needs the cores.
            done = torch.cuda.Event(blocking=True)
            done.record(self._side)
        return done.synchronize

    def land(self, gathered: Gathered) -> tuple[bool, Tensor, Tensor | None, torch.cuda.Event | None]:
        """Rebuild the mean gradient on the side stream. On the CPU, :meth:`finish` does it: see there."""
        has_dense = any(flags & Flag.HAS_DENSE for flags in gathered.flags)
        rows = gathered.rows.view(self._dtype)
        if self._side is None:
            return has_dense, rows, None, None
        with torch.cuda.device(self._side.device), torch.cuda.stream(self._side):
            weight, bias = rebuild(self._team, self._unit, rows.to(self._side.device, non_blocking=True))
            done = torch.cuda.Event()
            done.record(self._side)
        return has_dense, weight, bias, done

    def finish(self, is_used: bool) -> None:
        has_dense, weight, bias, done = self._team.result(self.future, self._unit.name)
        unit = self._unit
        if not is_used:
            return
        if has_dense:
            average_now(self._team, unit.parameters, unit.name)
        if self._side is None:
            # On this thread, not the receiving one, where BLAS may have other thread settings.
            weight, bias = rebuild(self._team, unit, weight)
        else:
            current = torch.cuda.current_stream(self._side.device)
            current.wait_event(done)
            for tensor in (weight, bias):
                tensor.record_stream(current)
        add_gradients(unit, (weight, bias))


def row_dtype(unit: LiveUnit, brought: Brought) -> torch.dtype:
    """Return the dtype in which rows of factors travel."""
    return brought.factor_dtype or unit.weight.dtype


def fill_rows(rows: Tensor, pieces: Sequence[FactorPair]) -> None:
    """Write the factors side by side into rows (X | G)."""
    start = 0
    for x, g in pieces:
        part = rows[start : start + x.shape[0]]
        part[:, : x.shape[1]] = x
        part[:, x.shape[1] :] = g
        start += x.shape[0]


def rebuild(team: Team, unit: LiveUnit, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean gradients of weight and bias, given all workers' rows (X | G)."""
    rows = rows.to(unit.weight.dtype)
    inputs = unit.weight.shape[1]
    x, g = rows[:, :inputs], rows[:, inputs:]
    # Scaling the narrow factor is cheaper than scaling the product.
    g = g * (1 / team.size)
    return g.t() @ x, g.sum(0)


def add_gradients(unit: LiveUnit, gradients: Sequence[Tensor]) -> None:
    """Add to ``.grad`` of the unit's parameters, in their order."""
    for parameter, gradient in zip(unit.parameters, gradients, strict=False):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
