"""Step 2 of the journey: ready units leave at once, by their route, in an order that all workers share where it matters.

Before: ``hooks.py`` says that a unit's gradient (or its factors) is complete. After: a route under ``poseidon/routes`` carries
it. Factors and rows travel as addressed messages and may leave in any order. Buckets travel by collectives, which must be
issued in the same order everywhere: a bucket that is complete early waits for those before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from poseidon.engine.buckets import Bucket, assign_buckets
from poseidon.routes.allreduce import AllreduceRoute
from poseidon.routes.base import Exchange, LiveUnit
from poseidon.routes.factors import FactorsRoute
from poseidon.routes.rows import RowsRoute


class Routes:
    """One instance of each route, for one team."""

    def __init__(self, allreduce: AllreduceRoute, factors: FactorsRoute, rows: RowsRoute) -> None:
        self.allreduce = allreduce
        self.factors = factors
        self.rows = rows


class Schedule:
    """A fixed assignment of units to routes and buckets; used for many steps.

    ``order`` holds unit numbers as they are expected to become ready. It must be the same on all workers, and so must
    ``route_of``.
    """

    def __init__(
        self,
        units: Sequence[LiveUnit],
        route_of: Mapping[int, str],
        order: Sequence[int],
        bucket_bytes: int,
        keep_views: bool,
    ) -> None:
        self.units = units
        self.route_of = dict(route_of)
        by_allreduce = [units[i] for i in order if route_of[i] == "allreduce"]
        parameters = [(unit.name, p) for unit in by_allreduce for p in unit.parameters]
        sizes = [((str(p.dtype), str(p.device)), p.numel() * p.element_size()) for _, p in parameters]
        self.buckets = [
            Bucket([parameters[i][1] for i in members], _bucket_name([parameters[i][0] for i in members]), keep_views)
            for members in assign_buckets(sizes, bucket_bytes)
        ]
        self.bucket_of: dict[nn.Parameter, int] = {
            p: b for b, bucket in enumerate(self.buckets) for p in bucket.parameters
        }


class Scheduler:
    """Runs one backward of a :class:`Schedule`: counts what is ready and starts what can start.

    Not thread-safe; the engine holds a lock around it.
    """

    def __init__(self, schedule: Schedule, routes: Routes, step: int) -> None:
        self._schedule = schedule
        self._routes = routes
        self._step = step
        self._missing = [len(bucket.parameters) for bucket in schedule.buckets]
        self._next_bucket = 0
        self._under_way: list[Exchange] = []
        self._bucket_exchanges: list[Exchange] = []

    def ready(self, unit: LiveUnit) -> None:
        """Take note that every gradient of the unit is final, and start whatever that completes."""
        route = self._schedule.route_of[unit.index]
        if route == "factors":
            self._under_way.append(self._routes.factors.start(unit, self._step))
        elif route == "rows":
            self._under_way.append(self._routes.rows.start(unit, self._step))
        else:
            for parameter in unit.parameters:
                self._missing[self._schedule.bucket_of[parameter]] -= 1
            self._start_buckets()

    def finish(self, is_used: Mapping[nn.Parameter, bool]) -> None:
        """Wait for everything under way and leave the means in ``.grad``."""
        assert self._next_bucket == len(self._schedule.buckets), "a unit was never reported ready"
        # Factors first: they left first in most models, and rebuilding them overlaps with the last bucket's wait.
        for exchange in self._under_way:
            exchange.finish()
        for bucket, exchange in zip(self._schedule.buckets, self._bucket_exchanges, strict=True):
            exchange.finish()
            bucket.unpack([is_used.get(p, True) for p in bucket.parameters])

    def _start_buckets(self) -> None:
        buckets = self._schedule.buckets
        while self._next_bucket < len(buckets) and self._missing[self._next_bucket] == 0:
            bucket = buckets[self._next_bucket]
            self._bucket_exchanges.append(self._routes.allreduce.start(bucket.pack(), bucket.name))
            self._next_bucket += 1


def _bucket_name(units: Sequence[str]) -> str:
    first, last = units[0], units[-1]
    return first if first == last else f"{first} ... {last}"
