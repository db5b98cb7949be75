"""The formulae against the Poseidon paper's cost table and against what any cost must satisfy."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.costs import Cost, allreduce_cost, factors_cost, rows_cost, sharded_cost, split_cost, tied_cost
from poseidon.planning.planner import make_plan
from poseidon.routes import standard_routes
from poseidon.units import Load, ParameterSpec, Unit

MACHINES, WORKERS = st.integers(1, 64), st.integers(1, 8)
LINKS = st.builds(Link, st.floats(1e6, 1e11), st.floats(0, 1e-2))
CLUSTERS = st.builds(Cluster, MACHINES, WORKERS, LINKS, LINKS, st.floats(1e9, 1e14))
SIDES = st.integers(1, 5000)
LOADS = st.builds(Load, st.integers(1, 4096), st.sampled_from([2, 4]))


def linear(outputs: int, inputs: int) -> Unit:
    return Unit("fc", "linear", (ParameterSpec("fc.weight", (outputs, inputs), 4),))


def embedding(rows: int, width: int) -> Unit:
    return Unit("table", "embedding", (ParameterSpec("table.weight", (rows, width), 4),))


ALL: list[Callable[[Load, Cluster, int, int], Cost]] = [
    lambda load, cluster, m, n: allreduce_cost(linear(m, n), load, cluster),
    lambda _, cluster, m, n: allreduce_cost(linear(m, n), None, cluster),
    lambda load, cluster, m, n: factors_cost(linear(m, n), load, cluster),
    lambda load, cluster, m, n: rows_cost(embedding(m, n), load, cluster),
]
EVERY_ROUTE = pytest.mark.parametrize("cost_of", ALL, ids=["allreduce", "allreduce-unseen", "factors", "rows"])


def test_the_papers_example() -> None:
    # 4096 x 4096, K = 32, P1 = P2 = 8: the paper counts values sent and received by a node, a card sends half of them.
    unit, load, cluster = linear(4096, 4096), Load(32), Cluster(8)
    assert 2 * allreduce_cost(unit, load, cluster).wire_bytes / 4 == pytest.approx(58.7e6, rel=1e-3)
    assert 2 * factors_cost(unit, load, cluster).wire_bytes / 4 == pytest.approx(3.67e6, rel=1e-3)


@given(SIDES, SIDES, st.integers(1, 1000), MACHINES)
def test_bytes_with_one_worker_per_machine_are_the_papers(m: int, n: int, k: int, p: int) -> None:
    cluster = Cluster(p)
    assert 2 * allreduce_cost(linear(m, n), None, cluster).wire_bytes == pytest.approx(4 * 2 * m * n * (p + p - 2) / p)
    assert 2 * factors_cost(linear(m, n), Load(k), cluster).wire_bytes == 4 * 2 * k * (p - 1) * (m + n)
    assert rows_cost(embedding(m, n), Load(k), cluster).wire_bytes == k * (4 * n + 8) * (p - 1)


@given(SIDES, SIDES, st.integers(0, 1000), st.integers(0, 1000), CLUSTERS)
def test_a_tied_table_costs_its_rows_and_its_factors(m: int, n: int, k: int, touched: int, cluster: Cluster) -> None:
    unit = Unit("words", "tied", (ParameterSpec("words.weight", (m, n), 4),))
    cost = tied_cost(unit, Load(k, 2, touched), cluster)
    rows, factors = rows_cost(embedding(m, n), Load(touched), cluster), factors_cost(linear(m, n), Load(k, 2), cluster)
    assert cost.wire_bytes == rows.wire_bytes + factors.wire_bytes
    assert cost.seconds == pytest.approx(rows.seconds + factors.seconds)


@given(SIDES, SIDES, st.integers(1, 1000), st.integers(0, 1000), st.integers(2, 64))
def test_a_split_table_costs_more_bytes_but_fewer_after_backward(m: int, n: int, k: int, touched: int, p: int) -> None:
    unit, load, cluster = Unit("words", "tied", (ParameterSpec("w", (m, n), 4),)), Load(k, 4, touched), Cluster(p)
    full = sharded_cost(unit, load, cluster)
    split, busy = (split_cost(unit, load, cluster, are_parts_hidden) for are_parts_hidden in (True, False))
    rows_bytes = touched * (4 * n + 8) * (p - 1) / p
    assert split.wire_bytes == pytest.approx(full.wire_bytes + rows_bytes)
    # Rows in exchange for half of the parts.
    saved_s = full.wire_s / 4 - rows_bytes / cluster.between.bytes_per_s
    assert split.seconds == pytest.approx(full.seconds - saved_s)
    assert busy.wire_bytes == split.wire_bytes
    assert busy.seconds == pytest.approx(full.seconds + rows_bytes / cluster.between.bytes_per_s)


@given(SIDES, SIDES, st.integers(1, 1000), st.integers(2, 64), WORKERS)
def test_workers_of_a_machine_share_its_gradient_and_add_their_factors(m: int, n: int, k: int, p: int, w: int) -> None:
    alone, crowded = Cluster(p), Cluster(p, w)
    unit, load = linear(m, n), Load(k)
    assert allreduce_cost(unit, load, crowded).wire_bytes == allreduce_cost(unit, load, alone).wire_bytes
    assert factors_cost(unit, load, crowded).wire_bytes == w * factors_cost(unit, load, alone).wire_bytes


@given(SIDES, SIDES, st.integers(1, 2000), st.integers(2, 64), st.sampled_from([2, 4]))
def test_factors_are_chosen_exactly_where_they_are_fewer_bytes(
    m: int, n: int, k: int, p: int, value_bytes: int
) -> None:
    # Without latency and with free arithmetic only bytes count; two machines or more make the ring the best allreduce.
    cluster = Cluster(p, between=Link(1e9, 0), flops=1e30)
    ring, broadcast = 2 * 4 * m * n * (p - 1) / p, k * (p - 1) * (m + n) * value_bytes
    if broadcast != pytest.approx(ring):
        route = make_plan([linear(m, n)], {"fc": Load(k, value_bytes)}, cluster, standard_routes()).routes["fc"]
        assert route == ("factors" if broadcast < ring else "allreduce")


@EVERY_ROUTE
@given(load=LOADS, cluster=CLUSTERS, m=SIDES, n=SIDES, factor=st.floats(1, 1000))
def test_nothing_gets_slower_by_better_hardware(
    cost_of: Callable[[Load, Cluster, int, int], Cost], load: Load, cluster: Cluster, m: int, n: int, factor: float
) -> None:
    def better(link: Link) -> list[Link]:
        return [Link(link.bits_per_s * factor, link.latency_s), Link(link.bits_per_s, link.latency_s / factor)]

    seconds = cost_of(load, cluster, m, n).seconds * (1 + 1e-9)
    for link in better(cluster.between):
        assert cost_of(load, replace(cluster, between=link), m, n).seconds <= seconds
    for link in better(cluster.inside):
        assert cost_of(load, replace(cluster, inside=link), m, n).seconds <= seconds
    for link in better(cluster.combining):
        assert cost_of(load, replace(cluster, shared=link), m, n).seconds <= seconds
    assert cost_of(load, replace(cluster, flops=cluster.flops * factor), m, n).seconds <= seconds


@EVERY_ROUTE
@given(load=LOADS, cluster=CLUSTERS, m=SIDES, n=SIDES)
def test_a_larger_layer_costs_more_and_one_worker_sends_nothing(
    cost_of: Callable[[Load, Cluster, int, int], Cost], load: Load, cluster: Cluster, m: int, n: int
) -> None:
    small, large = cost_of(load, cluster, m, n), cost_of(load, cluster, m, n + 1)
    assert large.wire_bytes >= small.wire_bytes
    assert large.seconds >= small.seconds * (1 - 1e-9)
    assert small.seconds == small.wire_s + small.compute_s
    if cluster.workers == 1:
        assert small.wire_bytes == small.wire_s == 0
    else:
        assert small.wire_bytes > 0
        assert small.wire_s > 0


@given(SIDES, SIDES, MACHINES, LINKS)
def test_allreduce_takes_the_better_of_ring_and_tree(m: int, n: int, p: int, link: Link) -> None:
    size = 4 * m * n
    calls = size / (25 * 2**20)
    ring = 2 * (p - 1) / p * size / link.bytes_per_s + 2 * (p - 1) * link.latency_s * calls
    hops = (p - 1).bit_length()
    tree = 2 * hops * (size / link.bytes_per_s + link.latency_s * calls)
    assert allreduce_cost(linear(m, n), None, Cluster(p, between=link)).wire_s == pytest.approx(min(ring, tree))


def test_a_tree_wins_where_latency_rules_and_a_ring_where_bandwidth_does() -> None:
    unit, p = linear(100, 100), 64
    size = unit.size_bytes
    slow_start = allreduce_cost(unit, None, Cluster(p, between=Link(1e12, 1.0))).wire_s
    assert slow_start == pytest.approx(2 * 6 * size / (25 * 2**20), rel=1e-3)
    slow_wire = allreduce_cost(unit, None, Cluster(p, between=Link(1e6, 0))).wire_s
    assert slow_wire == pytest.approx(2 * 63 / 64 * size * 8 / 1e6)


def test_every_worker_rebuilds_everybodys_share_of_the_gradient() -> None:
    cluster, unit, load = Cluster(4, 2, flops=1e9), linear(30, 40), Load(5)
    dense, rebuilt = allreduce_cost(unit, load, cluster), factors_cost(unit, load, cluster)
    assert dense.compute_s == pytest.approx(2 * 5 * 30 * 40 / 1e9)
    assert rebuilt.compute_s == pytest.approx(8 * dense.compute_s)


def test_half_precision_factors_take_half_the_bytes() -> None:
    cluster, unit = Cluster(4), linear(30, 40)
    assert 2 * factors_cost(unit, Load(5, 2), cluster).wire_bytes == factors_cost(unit, Load(5, 4), cluster).wire_bytes
