"""Step 3, factors: a linear layer's gradient travels as the two matrices whose product it is.

The gradient of an M x N weight over K rows of input is ``G^T X`` with G (K x M) the gradient of the layer's output and X
(K x N) its input. Sufficient factor broadcasting sends X and G, K (M + N) values, to everybody; each worker stacks all
rows in rank order and multiplies once. Every worker multiplies the same bytes in the same layout, so the results agree
bit for bit on equal hardware. The bias gradient is the column sum of G and costs nothing extra on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from poseidon.routes.allreduce import average_now
from poseidon.routes.base import Exchange, Factors, LiveUnit
from poseidon.routes.pairs import Gathered, Pairs, Parcel
from poseidon.team.team import Arrival, Team

_HAS_DENSE = 1


class FactorsRoute:
    """Exchanges the factors of linear units."""

    def __init__(self, team: Team, pairs: Pairs) -> None:
        self._team = team
        self._pairs = pairs
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, unit: LiveUnit, step: int) -> Exchange:
        """Send this worker's factors, which the unit gives away."""
        pieces, unit.pieces = unit.pieces, []
        dtype = pieces[0][0].dtype if pieces else unit.weight.dtype
        outputs, inputs = unit.weight.shape
        count = sum(x.shape[0] for x, _ in pieces)
        host = torch.empty(count, inputs + outputs, dtype=dtype, pin_memory=unit.weight.is_cuda)
        settle = None
        if unit.weight.is_cuda and pieces:
            settle = self._copy_from_device(host, pieces)
        else:
            _fill(host, pieces)
        parcel = Parcel(unit.index, unit.name, step, host.view(torch.uint8), _HAS_DENSE * unit.has_dense, settle)
        return _FactorsExchange(self._team, unit, self._pairs.start(parcel), dtype)

    def _copy_from_device(self, host: Tensor, pieces: Sequence[Factors]) -> Callable[[], None]:
        """Queue the copies on a side stream, so that the compute stream goes on with backward."""
        device = pieces[0][0].device
        side = self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            _fill(host, pieces)
            for tensor in (tensor for piece in pieces for tensor in piece):
                tensor.record_stream(side)
            done = torch.cuda.Event()
            done.record(side)
        return done.synchronize


class _FactorsExchange(Exchange):
    def __init__(self, team: Team, unit: LiveUnit, arrival: Arrival, dtype: torch.dtype) -> None:
        self._team = team
        self._unit = unit
        self._arrival = arrival
        self._dtype = dtype

    def finish(self) -> None:
        gathered: Gathered = self._arrival.wait(self._team, self._unit.name)
        unit = self._unit
        if not unit.is_used:
            return
        if any(flags & _HAS_DENSE for flags in gathered.flags):
            average_now(self._team, unit.parameters, unit.name)
        stacked = gathered.rows.view(self._dtype)
        stacked = stacked.to(unit.weight.device, unit.weight.dtype, non_blocking=True)
        inputs = unit.weight.shape[1]
        x, g = stacked[:, :inputs], stacked[:, inputs:]
        # Scaling the narrow factor is cheaper than scaling the product.
        g = g * (1 / self._team.size)
        _add_product(unit.weight, g, x)
        if unit.bias is not None:
            _add(unit.bias, g.sum(0).to(unit.bias.dtype))


def _fill(host: Tensor, pieces: Sequence[Factors]) -> None:
    start = 0
    for x, g in pieces:
        part = host[start : start + x.shape[0]]
        part[:, : x.shape[1]].copy_(x, non_blocking=True)
        part[:, x.shape[1] :].copy_(g, non_blocking=True)
        start += x.shape[0]


def _add_product(parameter: Tensor, g: Tensor, x: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = g.t() @ x
    else:
        parameter.grad.addmm_(g.t(), x)


def _add(parameter: Tensor, value: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = value
    else:
        parameter.grad.add_(value)
