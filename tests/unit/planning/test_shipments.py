from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poseidon.planning.packing import LARGEST_BUCKET_BYTES
from poseidon.planning.shipments import TRIFLE_S, Sending, share_messages
from poseidon.routes import standard_routes
from toy_models import FC, HEAD, TABLE, schedule, unit

RATE = 1e8
TRIFLE = TRIFLE_S * RATE


def layer(place: int, wire_bytes: float) -> Sending:
    return Sending(place, "factors", wire_bytes, is_leaf=False)


def table(place: int, wire_bytes: float) -> Sending:
    return Sending(place, "rows", wire_bytes, is_leaf=True)


def test_small_layers_share_messages_and_a_large_one_leaves_alone() -> None:
    small, large = TRIFLE / 3, 2 * TRIFLE
    sendings = [layer(0, small), layer(1, small), layer(2, large), layer(3, small), layer(4, small)]
    assert share_messages(sendings, RATE) == [[0, 1], [2], [3, 4]]


def test_neighbouring_tables_share_messages_whatever_they_weigh() -> None:
    sendings = [table(3, 5 * TRIFLE), table(4, 5 * TRIFLE), table(6, 5 * TRIFLE)]
    assert share_messages(sendings, RATE) == [[0, 1], [2]]
    assert share_messages([table(0, LARGEST_BUCKET_BYTES), table(1, 1)], RATE) == [[0], [1]]


def test_routes_share_no_messages() -> None:
    assert share_messages([layer(0, 1), table(1, 1), layer(2, 1), table(3, 1)], RATE) == [[0, 2], [1, 3]]


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 3 * TRIFLE)), max_size=12))
def test_each_is_in_one_group_and_no_group_of_layers_takes_long(given_sendings) -> None:
    sendings = [(table if leaf else layer)(at, size) for at, (leaf, size) in enumerate(given_sendings)]
    groups = share_messages(sendings, RATE)
    assert sorted(index for group in groups for index in group) == list(range(len(sendings)))
    for group in groups:
        assert group == sorted(group)
        if len(group) > 1 and not sendings[group[0]].is_leaf:
            assert sum(sendings[index].wire_bytes for index in group) <= TRIFLE


def test_a_schedule_names_the_units_of_a_shipment() -> None:
    other = unit("other", "embedding", (50, 4))
    units, routes = [TABLE, other, FC, HEAD], ["rows", "rows", "factors", "factors"]
    assert [item.shipment for item in schedule(units, routes).items] == [(3, 2), (3, 2), (1, 0), (1, 0)]
    assert [item.shipment for item in schedule([TABLE, FC, HEAD], ["rows", "allreduce", "sharded"]).items] == [()] * 3


def test_collectives_share_no_messages() -> None:
    made = schedule([FC, HEAD], ["factors", "factors"], routes=standard_routes(gathers_factors=True))
    assert [item.shipment for item in made.items] == [(), ()]
