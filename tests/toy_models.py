"""Small models as the pure parts see them: units without tensors, and schedules of them."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.route import Routes
from poseidon.planning.schedule import Model, Packing, Schedule, make_schedule
from poseidon.routes import standard_routes
from poseidon.units import Kind, Load, ParameterSpec, Unit

CLUSTER = Cluster(2, between=Link(1e9, 1e-4))
LOADS = {"fc": Load(8), "head": Load(8), "table": Load(5)}


def unit(name: str, kind: Kind, *shapes: tuple[int, ...], is_sparse: bool = False) -> Unit:
    specs = tuple(ParameterSpec(f"{name}.{i}", shape, 4) for i, shape in enumerate(shapes))
    return Unit(name, kind, specs, is_sparse)


CONV = unit("conv", "dense", (8, 3), (8,))
FC = unit("fc", "linear", (16, 8), (16,))
TABLE = unit("table", "embedding", (100, 4))
HEAD = unit("head", "linear", (4, 16))


def schedule(
    units: Sequence[Unit],
    route_of: Sequence[str],
    *,
    bucket_bytes: int | None = None,
    defers: bool = False,
    routes: Routes | None = None,
    order: Sequence[int] | None = None,
) -> Schedule:
    return make_schedule(
        Model.of(units),
        route_of,
        list(reversed(range(len(units)))) if order is None else order,
        routes or standard_routes(),
        Packing(CLUSTER, bucket_bytes, defers),
        LOADS,
        defers,
    )
