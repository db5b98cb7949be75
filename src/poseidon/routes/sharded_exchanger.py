"""The parameter server as an exchanger: every bucket has a slot there."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.routes.base import Brought, Context, Exchange, Exchanger, LiveItem
from poseidon.routes.sharded import ShardedRoute
from poseidon.sums.slots import Slot


class ShardedExchanger(Exchanger):
    """Averages buckets through the parameter server; calls may come in any order unless workers combine first."""

    def __init__(self, context: Context) -> None:
        self._route = ShardedRoute(context.team, context.is_cuda, context.cluster.between)
        self._slots: dict[LiveItem, Slot] = {}

    def prepare(self, items: Sequence[LiveItem]) -> None:
        """Agree on a slot for each bucket."""
        dtypes = [item.parameters[0].dtype for item in items]
        slots = self._route.book([item.item.numel for item in items], dtypes)
        self._slots = dict(zip(items, slots, strict=True))

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:  # noqa: ARG002
        """Replace the bucket by its mean over the team, in place."""
        return self._route.start(item.pack(), self._slots[item], step, item.name)

    def close(self) -> None:
        """End the threads and connections."""
        self._route.close()
