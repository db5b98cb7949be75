from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from poseidon.planning.ordering import order_by_need


def test_a_wire_that_keeps_up_sends_as_gradients_become_ready() -> None:
    assert order_by_need([1.0, 2.0, 3.0], [0.5, 0.5, 0.5]) == [0, 1, 2]


def test_a_wire_that_is_behind_sends_what_the_next_forward_needs_first() -> None:
    # While item 0 travels, all others become ready; the last of backward is the first of forward.
    assert order_by_need([0.0, 1.0, 2.0, 3.0], [10.0, 1.0, 1.0, 1.0]) == [0, 3, 2, 1]


def test_the_wire_never_waits_for_an_urgent_item_while_another_is_ready() -> None:
    assert order_by_need([0.0, 0.0, 5.0], [1.0, 1.0, 1.0]) == [1, 0, 2]


def test_nothing_to_send_needs_no_order() -> None:
    assert order_by_need([], []) == []


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=12))
def test_every_item_leaves_once_and_none_that_is_needed_sooner_was_ready(items: list[tuple[float, float]]) -> None:
    ready_s, wire_s = [ready for ready, _ in items], [wire for _, wire in items]
    order = order_by_need(ready_s, wire_s)
    assert sorted(order) == list(range(len(items)))
    now_s, left = 0.0, set(order)
    for item in order:
        now_s = max(now_s, min(ready_s[each] for each in left))
        assert ready_s[item] <= now_s
        assert not any(ready_s[other] <= now_s for other in left if other > item)
        left.remove(item)
        now_s += wire_s[item]
