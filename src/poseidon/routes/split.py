"""Step 3, split: the gradient of a table that is a linear layer's weight too, in two parts.

The linear layer, the *head*, has a full gradient early in backward; look-ups touch rows, which are known last. The
full gradient leaves at once, for the owners of its chunks, as with ``sharded``; the rows follow, each to the owners of
its values (``sums/touched.py``). So does anything else that is found in ``.grad`` when the item starts, such as a
penalty on the weight: with the full gradient, if that has not left yet, or else as rows, all of them.

The order of additions is the same for all workers and in all modes: the full gradients in rank order, then the sum of
all rows, which was added up in rank order. What comes back depends on the exchanger, which is that of ``sharded`` or of
``served``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from poseidon.routes.base import Brought, Exchange, LiveItem, LiveUnit
from poseidon.routes.catalogue import SplitRoute
from poseidon.sums.events import Waiter, record
from poseidon.sums.server import SumServer
from poseidon.sums.slots import Slot
from poseidon.sums.touched import TouchedRows

_URGENT = -1
"""The device runs this stream first: all workers wait for the rows."""


def row_width(item: LiveItem) -> int:
    """Return how many values a row has of the table whose touched rows an item sends; 0 if it sends none."""
    return item.unit.spec.matrix[1] if item.item.route == SplitRoute.name else 0


def _rows_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers, ascending, and the values of a gradient's rows."""
    if not gradient.is_sparse:
        return torch.arange(len(gradient), device=gradient.device), gradient
    summed = gradient.coalesce()
    return summed.indices()[0], summed.values()


class RowSender:
    """Sends touched rows after the part that they belong to."""

    def __init__(self, server: SumServer) -> None:
        self._server = server
        self._waiter: Waiter | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def send(self, slot: Slot, step: int, gradient: Tensor | None) -> None:
        """Send the rows of a sparse gradient, or all of a full one; never waits for a device."""
        if gradient is None:
            self._server.send_touched(slot, step, TouchedRows.none(slot.width))
        elif not gradient.is_cuda:
            numbers, values = _rows_of(gradient)
            rows = TouchedRows(numbers.numpy(), values.contiguous().numpy())
            self._server.send_touched(slot, step, rows)
        else:
            if self._waiter is None:
                self._waiter = Waiter("poseidon-rows")
            # A copy, because the gradient may be the user's, who may change it before it has been read.
            mine = gradient.detach().clone()
            there = record(torch.cuda.current_stream(gradient.device))
            self._waiter.put(there, partial(self._fetch_and_send, slot, step, mine), self._server.fail)

    def _fetch_and_send(self, slot: Slot, step: int, gradient: Tensor) -> None:
        """Read a gradient that is there. Finding the distinct rows of a sparse one waits for the device."""
        device = gradient.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=_URGENT)
        stream = self._streams[device]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            # PyTorch keeps pinned memory that is let go, for the next step.
            numbers, values = (
                torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=True).copy_(each, non_blocking=True)
                for each in _rows_of(gradient)
            )
            record(stream).synchronize()
        self._server.send_touched(slot, step, TouchedRows(numbers.numpy(), values.numpy()))

    def close(self) -> None:
        """Stop the thread, if any."""
        if self._waiter is not None:
            self._waiter.close()


class SplitExchange(Exchange):
    """A table's gradient under way; its mean comes back where the head's gradient lay."""

    def __init__(self, unit: LiveUnit, brought: Brought, rest: Tensor | None, summed: Exchange) -> None:
        self._unit = unit
        self._brought = brought
        self._rest = rest
        """What was in ``.grad``."""
        self._summed = summed

    def finish(self, is_used: bool) -> None:
        """Put the mean into ``.grad``."""
        self._summed.finish(is_used)
        mean, self._brought.head = self._brought.head, None
        self._unit.weight.grad = mean if is_used else self._rest

    def join_stream(self) -> None:
        """Make the current stream wait for it."""
        self._summed.join_stream()
