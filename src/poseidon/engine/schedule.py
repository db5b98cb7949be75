"""A plan made concrete: which gradients travel together, by which route, and what must keep its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from poseidon.engine.buckets import Bucket, assign_buckets
from poseidon.routes.base import LiveUnit
from poseidon.sums.slots import Slot

Book = Callable[[Sequence[int], Sequence[torch.dtype]], list[Slot]]
"""Agrees with all workers on slots of the parameter server for buckets of these sizes and types."""


@dataclass(frozen=True, eq=False)
class Box:
    """A bucket that goes through the parameter server, and its slot there."""

    bucket: Bucket
    slot: Slot

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Whose gradients are in it."""
        return self.bucket.parameters

    def wire_bytes(self, machines: int) -> float:
        """Bytes one machine sends."""
        return self.bucket.wire_bytes(machines)


@dataclass(frozen=True, eq=False)
class Gather:
    """A unit whose factors travel by a collective, and the size that was planned for them."""

    unit: LiveUnit
    capacity: int
    value_bytes: int

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Whose gradients it brings."""
        return self.unit.parameters

    def wire_bytes(self, machines: int) -> float:
        """Bytes one machine sends."""
        return self.capacity * sum(self.unit.weight.shape) * self.value_bytes * (machines - 1)


Item = Bucket | Box | Gather
"""What travels as one and starts when the gradients of all its parameters are final."""


class Schedule:
    """A fixed assignment of units to routes and items; used for many steps.

    ``order`` holds unit numbers as they are expected to become ready; ``bucket_bytes`` and ``served_bytes`` limit what
    shares a collective and what goes through the parameter server together. Everything here must be the same on all
    workers. Making one that uses the parameter server is collective, through ``book``.
    """

    def __init__(
        self,
        units: Sequence[LiveUnit],
        route_of: Mapping[int, str],
        order: Sequence[int],
        bucket_bytes: int,
        keep_views: bool,
        gathers: Sequence[Gather] = (),
        served_bytes: int = 0,
        book: Book | None = None,
    ) -> None:
        self.route_of = dict(route_of)
        self._units = units
        self._keep_views = keep_views
        place = {unit: i for i, unit in enumerate(order)}
        collectives: list[tuple[int, Bucket | Gather]] = [(place[gather.unit.index], gather) for gather in gathers]
        for last, bucket in self._fill_buckets("allreduce", order, bucket_bytes):
            collectives.append((place[last], bucket))
        self.collectives: list[Item] = [item for _, item in sorted(collectives, key=lambda pair: pair[0])]
        """Must be started in this order on all workers."""
        served = [bucket for _, bucket in self._fill_buckets("sharded", order, served_bytes)]
        self.boxes: list[Item] = []
        """In the order in which they are expected to be ready; may be started in any."""
        if served:
            assert book is not None
            slots = book([bucket.size for bucket in served], [bucket.parameters[0].dtype for bucket in served])
            self.boxes = [Box(bucket, slot) for bucket, slot in zip(served, slots, strict=True)]
        self.item_of = {p: item for item in [*self.collectives, *self.boxes] for p in item.parameters}

    def reorder(self, order: Sequence[int]) -> None:
        """Start collectives in another order from now on, given as their present numbers."""
        self.collectives = [self.collectives[number] for number in order]

    def _fill_buckets(self, route: str, order: Sequence[int], limit_bytes: int) -> list[tuple[int, Bucket]]:
        """Return the buckets of all units of one route, each with the unit that completes it."""
        members = [(i, p) for i in order if self.route_of[i] == route for p in self._units[i].parameters]
        sizes = [((str(p.dtype), str(p.device)), p.numel() * p.element_size()) for _, p in members]
        buckets = []
        for chosen in assign_buckets(sizes, limit_bytes):
            names = [self._units[members[i][0]].name for i in chosen]
            bucket = Bucket([members[i][1] for i in chosen], _bucket_name(names), self._keep_views)
            buckets.append((members[chosen[-1]][0], bucket))
        return buckets


def _bucket_name(units: Sequence[str]) -> str:
    first, last = units[0], units[-1]
    return first if first == last else f"{first} ... {last}"
