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

import torch
from torch import Tensor

from poseidon.routes.base import Brought, Exchange, LiveItem, LiveUnit
from poseidon.routes.catalogue import SplitRoute
from poseidon.sums.events import Waiter, record
from poseidon.sums.server import SumServer
from poseidon.sums.slots import Slot
from poseidon.sums.touched import TouchedRows


def row_width(item: LiveItem) -> int:
    """Return how many values a row has of the table whose touched rows an item sends; 0 if it sends none."""
    return item.unit.spec.matrix[1] if item.item.route == SplitRoute.name else 0


class RowSender:
    """Sends touched rows after the part that they belong to."""

    def __init__(self, server: SumServer) -> None:
        self._server = server
        self._waiter: Waiter | None = None

    def send(self, slot: Slot, step: int, gradient: Tensor | None) -> None:
        """Send the rows of a sparse gradient, or all of a full one; never waits for a device."""
        if gradient is None:
            self._server.send_touched(slot, step, TouchedRows.none(slot.width))
            return
        if gradient.is_sparse:
            summed = gradient.coalesce()
            numbers, values = summed.indices()[0], summed.values()
        else:
            numbers, values = torch.arange(len(gradient), device=gradient.device), gradient
        if not values.is_cuda:
            rows = TouchedRows(numbers.numpy(), values.contiguous().numpy())
            self._server.send_touched(slot, step, rows)
            return
        held = []
        for each in (numbers, values):
            held.append(torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=True))
            held[-1].copy_(each, non_blocking=True)
        rows = TouchedRows(held[0].numpy(), held[1].numpy())
        if self._waiter is None:
            self._waiter = Waiter("poseidon-rows")
        copied = record(torch.cuda.current_stream(values.device))
        self._waiter.put(copied, lambda: self._server.send_touched(slot, step, rows), self._server.fail)

    def close(self) -> None:
        """Stop the thread, if any."""
        if self._waiter is not None:
            self._waiter.close()


class SplitExchange(Exchange):
    """A table's gradient under way; its mean comes back where the head's gradient lay."""

    def __init__(self, unit: LiveUnit, brought: Brought, summed: Exchange) -> None:
        self._unit = unit
        self._brought = brought
        self._summed = summed

    def finish(self, is_used: bool) -> None:
        """Add the mean to ``.grad``."""
        self._summed.finish(is_used)
        weight, brought = self._unit.weight, self._brought
        mean, kept = brought.head, brought.kept
        brought.head = brought.kept = None
        if not is_used:
            weight.grad = kept
        else:
            assert mean is not None
            weight.grad = mean if kept is None else kept.add_(mean)

    def join_stream(self) -> None:
        """Make the current stream wait for it."""
        self._summed.join_stream()
