from hypothesis import given
from hypothesis import strategies as st

from poseidon.wire.outbox import Outbox, Outgoing


def message(name, priority=0, size=10):
    return Outgoing(name, memoryview(bytes(size)), priority)


def taken(outbox):
    result = outbox.take()
    return None if result is None else (result[0], result[1].head)


def test_urgent_messages_overtake_what_waits_but_not_what_is_under_way():
    outbox = Outbox(streams=1, in_flight_bytes=1)
    for name, priority in (("a", 5), ("b", 5), ("c", 1)):
        outbox.put(message(name, priority))
    assert taken(outbox) == (0, "c")
    assert taken(outbox) is None
    outbox.put(message("d", 0))
    outbox.release(0, 10)
    assert taken(outbox) == (0, "d")
    outbox.release(0, 10)
    assert taken(outbox) == (0, "a")
    outbox.release(0, 10)
    assert taken(outbox) == (0, "b")
    assert not outbox.waiting
    assert not outbox.idle
    outbox.release(0, 10)
    assert outbox.idle


def test_streams_share_the_load():
    outbox = Outbox(streams=2, in_flight_bytes=15)
    for name in "abcde":
        outbox.put(message(name))
    assert [taken(outbox) for _ in range(5)] == [(0, "a"), (1, "b"), (0, "c"), (1, "d"), None]
    outbox.release(1, 10)
    assert taken(outbox) == (1, "e")


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 50)), max_size=40),
    st.integers(1, 3),
    st.integers(1, 60),
)
def test_all_leave_in_order_and_none_is_given_much(messages, streams, limit):
    outbox = Outbox(streams, limit)
    for number, (priority, size) in enumerate(messages):
        outbox.put(message(number, priority, size))
    busy, left = [[] for _ in range(streams)], []
    while outbox.waiting:
        while (result := outbox.take()) is not None:
            stream, out = result
            assert sum(busy[stream]) < limit
            busy[stream].append(out.payload.nbytes)
            left.append(out.head)
        if outbox.waiting:
            stream = max(range(streams), key=lambda index: sum(busy[index]))
            outbox.release(stream, busy[stream].pop(0))
    assert left == sorted(range(len(messages)), key=lambda number: messages[number][0])
