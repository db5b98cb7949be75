"""The cost of exchanging one unit by each route: bytes on the wire, and seconds.

With P machines of L workers each (W = P L workers in all), B bytes of gradient, K rows of input per worker, a weight of
M x N values and factors of v bytes per value, one machine's network card sends, and receives as much:

====================  ==================================================================================
allreduce (ring)      ``2 B (P - 1) / P``: the machine combines inside first, so its workers share this
sharded               ``2 B (P - 1) / P``: every machine owns a share of the parameter server, 2 hops per chunk
factors               ``L K (M + N) v (P - 1)``: every worker's factors, once to every other machine
rows                  ``L U (D s + 8) (P - 1)``: U touched rows of D values of s bytes, and their indices
tied                  both, for a table that is a linear layer's weight too
split                 ``(2 B + L U (D s + 8)) (P - 1) / P``: sharded, and rows to the owners of their values
====================  ==================================================================================

For L = 1 these are the parameter-server and SFB rows of the Poseidon paper's cost table (a co-located server moves as
much as a ring). A tree (``log2 P`` hops of B bytes) beats a ring when latency dominates; the smaller of the two counts.
The arithmetic differs too: a dense gradient takes ``2 K M N`` operations on its own worker, a gradient rebuilt from all
workers' factors ``2 K W M N``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.packing import LARGEST_BUCKET_BYTES
from poseidon.units import Load, Unit

INDEX_BYTES = 8
"""Of a touched row's number."""


@dataclass(frozen=True)
class Cost:
    """What one route would cost for one unit and step."""

    wire_bytes: float
    """Sent by one machine's network card (by one worker, with a single machine)."""
    wire_s: float
    """Time on the busiest link, latency included."""
    compute_s: float
    """Time on the device to compute the gradient."""

    @property
    def seconds(self) -> float:
        """What the planner compares."""
        return self.wire_s + self.compute_s


def _ring_or_tree_s(size_bytes: float, members: int, link: Link) -> float:
    """Seconds for an allreduce among ``members`` over ``link``; units in a bucket share the latency."""
    if members < 2:
        return 0.0
    calls = size_bytes / LARGEST_BUCKET_BYTES
    ring = 2 * (members - 1) / members * size_bytes / link.bytes_per_s + 2 * (members - 1) * link.latency_s * calls
    hops = math.ceil(math.log2(members))
    tree = 2 * hops * (size_bytes / link.bytes_per_s + link.latency_s * calls)
    return min(ring, tree)


def allreduce_cost(unit: Unit, load: Load | None, cluster: Cluster) -> Cost:
    """Cost of averaging the full gradient with collectives."""
    size = unit.size_bytes
    wire_s = _ring_or_tree_s(size, cluster.machines, cluster.between)
    wire_s += _ring_or_tree_s(size, cluster.workers_per_machine, cluster.combining)
    compute_s = 0.0
    if unit.kind in ("linear", "tied") and load is not None:
        rows, columns = unit.matrix
        compute_s = 2 * load.rows * rows * columns / cluster.flops
    members = cluster.machines if cluster.machines > 1 else cluster.workers_per_machine
    return Cost(2 * size * (members - 1) / members, wire_s, compute_s)


def sharded_cost(unit: Unit, load: Load | None, cluster: Cluster) -> Cost:
    """Cost of averaging the full gradient through a parameter server that is spread over the machines."""
    combined = allreduce_cost(unit, load, cluster)
    machines = cluster.machines
    hops = 2 * cluster.between.latency_s * unit.size_bytes / LARGEST_BUCKET_BYTES
    between_s = 2 * (machines - 1) / machines * unit.size_bytes / cluster.between.bytes_per_s + hops
    inside_s = _ring_or_tree_s(unit.size_bytes, cluster.workers_per_machine, cluster.combining)
    return Cost(combined.wire_bytes, between_s + inside_s, combined.compute_s)


def parts_cost(unit: Unit, load: Load | None, cluster: Cluster, share: float = 1.0) -> Cost:
    """Cost of a parameter server to which every worker sends its own parts, in ``share`` of their bytes.

    The workers of a machine do not combine first, as where something is lost.
    """
    single = sharded_cost(unit, load, replace(cluster, workers_per_machine=1))
    # To and from those owners that are on the same machine, and all others.
    near_bytes = 2 * (cluster.workers_per_machine - 1) / cluster.workers * unit.size_bytes * share
    hops = 2 * cluster.inside.latency_s * unit.size_bytes * share / LARGEST_BUCKET_BYTES
    near_s = near_bytes / cluster.inside.bytes_per_s + hops if near_bytes else 0.0
    if cluster.machines == 1:
        return Cost(near_bytes, near_s, single.compute_s)
    far = cluster.workers_per_machine * share
    return Cost(single.wire_bytes * far, single.wire_s * far + near_s, single.compute_s)


def _broadcast_cost(worker_bytes: float, cluster: Cluster) -> tuple[float, float]:
    """Bytes and seconds for every worker's message to reach every other worker."""
    between = cluster.workers_per_machine * worker_bytes * (cluster.machines - 1)
    inside = worker_bytes * (cluster.workers - 1) if cluster.workers_per_machine > 1 else 0.0
    seconds = inside / cluster.inside.bytes_per_s
    if cluster.machines > 1:
        # A header precedes the rows, to every peer.
        seconds += between / cluster.between.bytes_per_s + 2 * cluster.between.latency_s
    if cluster.workers_per_machine > 1:
        seconds += 2 * cluster.inside.latency_s
    return (between if cluster.machines > 1 else inside), seconds


def factors_cost(unit: Unit, load: Load, cluster: Cluster) -> Cost:
    """Cost of sending both factors of a linear unit's gradient to all workers."""
    rows, columns = unit.matrix
    wire_bytes, wire_s = _broadcast_cost(load.rows * (rows + columns) * load.value_bytes, cluster)
    return Cost(wire_bytes, wire_s, 2 * load.rows * cluster.workers * rows * columns / cluster.flops)


def rows_cost(unit: Unit, load: Load, cluster: Cluster) -> Cost:
    """Cost of sending the touched rows of an embedding unit's gradient to all workers."""
    return _rows_cost(unit, load.rows, cluster)


def tied_cost(unit: Unit, load: Load, cluster: Cluster) -> Cost:
    """Cost of sending the touched rows of a table and the factors of the linear layer that has the same weight."""
    rows, factors = _rows_cost(unit, load.touched, cluster), factors_cost(unit, load, cluster)
    return Cost(rows.wire_bytes + factors.wire_bytes, rows.wire_s + factors.wire_s, factors.compute_s)


def split_cost(unit: Unit, load: Load, cluster: Cluster, are_parts_hidden: bool) -> Cost:
    """Cost of sending a linear layer's full gradient early, and the touched rows of the table that is its weight.

    Tables are looked up first, so the gradient of one is final last and nothing hides its exchange. Here only rows and
    what comes back are left then. The parts travel during backward: with ``are_parts_hidden`` half of their time
    counts. They are not hidden where the wire is busy all the time anyway.
    """
    full = sharded_cost(unit, load, cluster)
    sent = cluster.workers_per_machine * touched_bytes(unit, load)
    rows_bytes = sent * (cluster.machines - 1) / cluster.machines
    rows_s = rows_bytes / cluster.between.bytes_per_s if cluster.machines > 1 else sent / cluster.inside.bytes_per_s
    return Cost(full.wire_bytes + rows_bytes, full.wire_s * (3 / 4 if are_parts_hidden else 1) + rows_s, full.compute_s)


def touched_bytes(unit: Unit, load: Load) -> float:
    """Return the bytes of the rows that one worker's look-ups touch in a tied table."""
    return load.touched * _row_bytes(unit)


def _row_bytes(unit: Unit) -> int:
    _, width = unit.matrix
    return width * unit.parameters[0].itemsize + INDEX_BYTES


def _rows_cost(unit: Unit, touched: float, cluster: Cluster) -> Cost:
    wire_bytes, wire_s = _broadcast_cost(touched * _row_bytes(unit), cluster)
    return Cost(wire_bytes, wire_s, 0.0)
