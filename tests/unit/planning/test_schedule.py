from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.planning.packing import LARGEST_BUCKET_BYTES, even_buckets
from poseidon.planning.route import Routes
from poseidon.planning.schedule import Model, Packing, make_schedule
from poseidon.planning.transfers import Conditions
from poseidon.routes import standard_routes
from poseidon.routes.catalogue import COLLECTIVES, COMBINED, AllreduceRoute
from toy_models import CLUSTER, CONV, FC, HEAD, TABLE, schedule, unit


def test_whole_gradients_are_packed_and_short_forms_travel_alone() -> None:
    made = schedule([CONV, FC, TABLE, HEAD], ["allreduce", "factors", "rows", "allreduce"])
    assert [(item.route, item.name, item.is_packed) for item in made.items] == [
        ("rows", "table", False),
        ("factors", "fc", False),
        ("allreduce", "head ... conv", True),
    ]
    assert made.queues == {COLLECTIVES: (2,)}
    assert made.item_of == {0: 2, 1: 2, 2: 1, 3: 1, 4: 0, 5: 2}
    assert [item.load for item in made.items][:2] != [None, None]


def test_collectives_of_all_routes_share_one_queue() -> None:
    made = schedule([CONV, FC], ["allreduce", "factors"], routes=standard_routes(gathers_factors=True))
    assert made.queues == {COLLECTIVES: (0, 1)}


def test_messages_need_no_queue_unless_workers_combine_first() -> None:
    assert schedule([CONV, HEAD], ["sharded", "sharded"]).queues == {}
    combined = schedule([CONV, HEAD], ["sharded", "sharded"], routes=standard_routes(combines_first=True))
    assert list(combined.queues) == [COMBINED]


def test_items_come_in_the_order_their_last_unit_is_ready_and_the_last_is_the_most_urgent() -> None:
    made = schedule([CONV, FC, HEAD], ["sharded"] * 3, bucket_bytes=1, order=[2, 0, 1])
    assert list(dict.fromkeys(item.units for item in made.items)) == [(2,), (0,), (1,)]
    priorities = [item.priority for item in made.items]
    assert priorities == sorted(priorities, reverse=True)
    assert min(priorities) == 1


def test_units_in_a_short_form_land_first_and_by_their_numbers() -> None:
    made = schedule([FC, CONV, TABLE, HEAD], ["factors", "allreduce", "rows", "factors"], order=[3, 2, 1, 0])
    assert [made.items[number].name for number in made.landing_order] == ["fc", "table", "head", "conv"]


def test_messages_land_before_collectives() -> None:
    routes = standard_routes(gathers_factors=True)
    made = schedule([FC, CONV, TABLE, HEAD], ["factors", "allreduce", "rows", "factors"], routes=routes)
    assert [made.items[number].name for number in made.landing_order] == ["table", "fc", "head", "conv"]


def test_a_queue_can_be_reordered_and_nothing_else_changes() -> None:
    made = schedule([CONV, FC, HEAD], ["allreduce"] * 3, bucket_bytes=1)
    queue = made.queues[COLLECTIVES]
    other = made.reordered(COLLECTIVES, list(reversed(range(len(queue)))))
    assert other.queues[COLLECTIVES] == tuple(reversed(queue))
    assert other.items == made.items
    assert made.queues[COLLECTIVES] == queue


@given(
    st.lists(st.tuples(st.sampled_from(["allreduce", "sharded"]), st.integers(1, 10**6)), min_size=1, max_size=12),
    st.integers(1, LARGEST_BUCKET_BYTES),
    st.randoms(use_true_random=False),
)
def test_every_parameter_is_in_one_item_of_its_route(layers, limit, random) -> None:
    units = [unit(f"u{i}", "dense", (size,), (1,)) for i, (_, size) in enumerate(layers)]
    order = random.sample(range(len(units)), len(units))
    made = schedule(units, [route for route, _ in layers], bucket_bytes=limit, order=order)
    members = [p for item in made.items for p in item.parameters]
    assert sorted(members) == list(range(2 * len(units)))
    assert all(layers[unit][0] == item.route for item in made.items for unit in item.units)
    assert sum(item.numel for item in made.items) == sum(size + 1 for _, size in layers)
    place = {unit: at for at, unit in enumerate(order)}
    ready = [max(place[unit] for unit in item.units) for item in made.items]
    assert ready == sorted(ready)


def test_parameters_of_different_kinds_share_no_item() -> None:
    model = Model.of([CONV], kinds=["float32", "float16"])
    made = make_schedule(model, ["allreduce"], [0], standard_routes(), Packing(CLUSTER))
    assert [item.parameters for item in made.items] == [(0,), (1,)]


def test_two_routes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two routes are named 'allreduce'"):
        Routes([AllreduceRoute(), AllreduceRoute()])


def test_transfers_carry_what_the_costs_count() -> None:
    routes, conditions = standard_routes(), Conditions(CLUSTER)
    units = [CONV, FC, TABLE]
    made = schedule(units, ["sharded", "factors", "rows"])
    for item in made.items:
        counted = sum(routes[item.route].cost(spec, item.load, CLUSTER).wire_bytes for spec in item.specs)
        moved = sum(transfer.out_bytes for transfer in routes[item.route].transfers(item, conditions))
        assert moved == pytest.approx(counted)


@pytest.mark.parametrize(
    ("compacts", "precision", "parts", "sums"),
    [
        (False, "float32", 32, 32),
        (True, "float32", 27.4, 27.4),
        (True, "bf16", 11.4, 16.0),
        (True, "fp16", 15.4, 19.1),
        (False, "bf16", 16, 32),
    ],
)
def test_parts_and_sums_travel_in_the_bits_that_their_precision_leaves(
    compacts: bool, precision: str, parts: float, sums: float
) -> None:
    large = unit("large", "dense", (4096, 2048))
    (item,) = schedule([large], ["sharded"]).items
    conditions = Conditions(CLUSTER, compacts=compacts, precision=precision)
    transfers = standard_routes()["sharded"].transfers(item, conditions)
    legs = [sum(transfer.legs[at].out_bytes for transfer in transfers) for at in (0, 1)]
    # Each of the two workers owns half of the values.
    assert [8 * leg / (4096 * 2048 / 2) for leg in legs] == pytest.approx([parts, sums])


def test_even_buckets_are_as_torch_makes_them() -> None:
    mib = 2**20
    sizes = [("float32", size) for size in (mib // 2, mib // 2, 10 * mib, 20 * mib, mib)]
    assert even_buckets(sizes, 25 * mib) == [[0, 1], [2, 3], [4]]
    assert even_buckets([], 25 * mib) == []
    assert even_buckets([("float32", mib), ("float64", mib), ("float32", mib)], 25 * mib) == [[0], [1], [2]]
