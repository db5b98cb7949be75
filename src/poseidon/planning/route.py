"""The contract of a route: one way in which a unit's gradient becomes the mean over all workers.

This is all that the rest of the code knows about a route: the planner asks what it accepts and costs, the schedule how
to pack, the step whether items must keep an order, the front end what to deliver, the simulator which transfers an item
makes. :meth:`Route.open` returns what moves the bytes: the route's exchanger for one team (``routes/base.py``). A new
route is one class that implements this, registered with ``poseidon.routes.register``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from poseidon.errors import ConfigError, UnsupportedError, unknown_name
from poseidon.planning.cluster import Cluster
from poseidon.planning.costs import Cost
from poseidon.planning.packing import limit_collective
from poseidon.planning.transfers import Conditions, Leg, Transfer
from poseidon.units import Load, Unit

if TYPE_CHECKING:
    from poseidon.planning.schedule import Item

Delivery = Literal["gradients", "factors", "rows", "rows and factors", "rows and head"]


class Route(ABC):
    """How one kind of unit exchanges its gradient. Immutable; equal on all workers."""

    name: str
    """Used in options and shown in the plan."""
    summary: str
    """One line for the documentation."""
    delivers: Delivery = "gradients"
    """What a front end hands over: full gradients in ``.grad``, the factors of a linear layer, touched rows; for a
    table that is a linear layer's weight too, rows and either the factors or the full gradient of that layer, its head,
    as soon as it is final."""
    has_flags: bool = False
    """Items carry a flag word that all workers must know before any item lands (:class:`routes.base.Flag`)."""
    shares_messages: bool = False
    """Small units may leave in one message per peer (``shipments.py``); their exchanger then sends parcels."""
    uses_wire: bool = False
    """Whether all that it sends goes over the wire (``team.mail``, ``connect_wire``), as a job that encrypts needs."""
    is_lossy: bool = False
    """It loses something, and keeps that for the next step, so only users choose it. What shares an item depends on
    the model alone: a job that goes on from a checkpoint must round alike from its first step."""
    refuses: str = "gradients that it cannot carry"
    """What it does not accept, for errors."""
    note: str = ""
    """Why the planner prefers it to the first route that accepts the same units, if it saves no bytes."""

    @property
    def queue(self) -> str | None:
        """Items of one queue start in one order on all workers, as collectives must; None: in any order."""
        return None

    @property
    def exchanger(self) -> str:
        """Name of the route that opens the exchanger of this one's items; several routes may share one."""
        return self.name

    @abstractmethod
    def accepts(self, unit: Unit) -> bool:
        """Return whether the route can carry this unit exactly."""

    @abstractmethod
    def cost(self, unit: Unit, load: Load | None, cluster: Cluster) -> Cost | None:
        """Return what one step costs; None if that depends on a load that has not been observed."""

    def is_offered(self, cluster: Cluster) -> bool:  # noqa: ARG002 - for routes that depend on it
        """Return whether the planner may choose it without being asked."""
        return True

    def loses(self, unit: Unit) -> bool:  # noqa: ARG002 - for routes that depend on it
        """Return whether something of this unit is lost on the way; never by an exact route."""
        return self.is_lossy

    @property
    def is_packed(self) -> bool:
        """Whether several parameters share an item; otherwise every unit is a separate item."""
        return self.delivers == "gradients"

    def limit_bytes(self, asked_bytes: int | None, defers: bool, cluster: Cluster) -> int:  # noqa: ARG002
        """Return the most bytes that share an item; ``defers``: the next forward need not wait for all of them."""
        return limit_collective(asked_bytes, defers)

    def transfers(self, item: Item, conditions: Conditions) -> list[Transfer]:
        """Return what the simulator moves for an item; by default, every machine sends the cost's bytes in one leg."""
        costs = [self.cost(unit, item.load, conditions.cluster) for unit in item.specs]
        return [
            Transfer(
                name=item.name,
                units=item.units,
                route=self.name,
                legs=(Leg(sum(cost.wire_bytes for cost in costs if cost is not None)),),
                is_collective=self.queue is not None,
                is_whole=self.delivers == "gradients",
                priority=item.priority,
            )
        ]

    def open(self, context: Any) -> Any:  # noqa: ARG002
        """Return what moves items for one team: an ``Exchanger``, given a ``Context`` (``routes/base.py``). Collective.

        Neither type is named here, because this module does not import torch.
        """
        raise UnsupportedError(f"route {self.name!r} can be simulated but not used: it does not implement open()")


class Routes(Mapping[str, Route]):
    """Routes by name, in the order in which ties between them are decided."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes: dict[str, Route] = {}
        for route in routes:
            if route.name in self._routes:
                raise ConfigError(f"two routes are named {route.name!r}; rename one of them")
            self._routes[route.name] = route

    def __getitem__(self, name: str) -> Route:
        if name not in self._routes:
            raise unknown_name("route", name, list(self._routes))
        return self._routes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._routes

    def __iter__(self) -> Iterator[str]:
        return iter(self._routes)

    def __len__(self) -> int:
        return len(self._routes)

    def for_unit(self, unit: Unit) -> list[Route]:
        """Return every route that can carry the unit exactly."""
        return [route for route in self._routes.values() if route.accepts(unit)]

    def first_for(self, unit: Unit) -> Route:
        """Return the route a unit takes before its load is known."""
        return self.for_unit(unit)[0]
