import numpy as np
import pytest

from poseidon.errors import WireError
from poseidon.wire.memory import make_memory_network
from poseidon.wire.message import Header, Kind


def push(sender, chunk, values, **fields):
    return Header(Kind.PART, sender, 0, chunk, 0, values.nbytes, **fields)


def inbox(transport):
    got = []
    transport.listen(Kind.PART, lambda header, payload: got.append((header.number, np.frombuffer(payload, np.float32))))
    return got


def test_messages_arrive_by_priority_then_order():
    first, second = make_memory_network(2)
    got = inbox(second)
    for chunk, priority in enumerate([1, 0, 1, 0]):
        values = np.full(3, chunk, np.float32)
        first.send(1, push(0, chunk, values), values, priority=priority)
    assert got == []
    assert first.network.pump() == 4
    assert [chunk for chunk, _ in got] == [1, 3, 0, 2]
    assert all((values == chunk).all() and len(values) == 3 for chunk, values in got)
    assert (first.stats.sent_messages, first.stats.sent_bytes) == (4, 48)
    assert (second.stats.received_messages, second.stats.received_bytes) == (4, 48)


def test_the_test_chooses_the_order():
    first, second = make_memory_network(2, scheduler=lambda parcels: len(parcels) - 1)
    got = inbox(second)
    for chunk in range(3):
        first.send(1, push(0, chunk, np.zeros(1, np.float32)), np.zeros(1, np.float32))
    assert first.network.pump(limit=2) == 2
    assert [chunk for chunk, _ in got] == [2, 1]


def test_payload_is_read_late_and_sent_once():
    first, second = make_memory_network(2)
    got, sent = inbox(second), []
    values = np.zeros(2, np.float32)
    first.send(1, push(0, 0, values), values, on_sent=lambda: sent.append(True))
    values += 7
    assert not sent
    first.network.pump()
    values += 1
    assert sent == [True]
    assert got[0][1].tolist() == [7, 7]


def test_a_rank_may_write_to_itself():
    (alone,) = make_memory_network(1)
    got = inbox(alone)
    alone.send(0, push(0, 5, np.zeros(1, np.float32)), np.zeros(1, np.float32))
    alone.network.pump()
    assert [chunk for chunk, _ in got] == [5]


def test_wrong_sends_are_refused():
    first, _ = make_memory_network(2)
    values = np.zeros((4, 4), np.float32)
    with pytest.raises(WireError, match="rank 0 cannot send to rank 2; there are 2 ranks"):
        first.send(2, push(0, 0, values), values)
    with pytest.raises(WireError, match="announces 8 bytes, but its payload has 64"):
        first.send(1, Header(Kind.PART, 0, 0, 0, 0, 8), values)
    with pytest.raises(WireError, match="one contiguous piece"):
        first.send(1, push(0, 0, values), values[:, ::2])
    first.listen(Kind.PART, print)
    with pytest.raises(WireError, match="already listens to PART"):
        first.listen(Kind.PART, print)
    first.close()
    with pytest.raises(WireError, match="its transport is closed"):
        first.send(1, push(0, 0, values), values)


def test_a_dead_rank_takes_its_messages_along_and_the_others_are_told():
    transports = make_memory_network(3)
    got, lost = inbox(transports[1]), []
    for rank in (0, 2):
        transports[rank].listen_lost(lambda dead, why, rank=rank: lost.append((rank, dead, why)))
        transports[rank].send(1, push(rank, rank, np.zeros(1, np.float32)), np.zeros(1, np.float32))
    transports[2].die("pulled the plug")
    transports[0].network.pump()
    assert [chunk for chunk, _ in got] == [0]
    assert lost == [(0, 2, "pulled the plug")]


def test_a_loss_is_told_to_who_listens_only_later() -> None:
    transports = make_memory_network(2)
    transports[1].die()
    transports[0].network.pump()
    told: list[int] = []
    transports[0].listen_lost(lambda peer, _why: told.append(peer))
    assert told == [1]


def test_one_message_for_several_peers_counts_and_arrives_once_for_each():
    transports = make_memory_network(4)
    got = {peer: inbox(transports[peer]) for peer in range(4)}
    values = np.arange(3, dtype=np.float32)
    transports[0].send_all((3, 1), push(0, 7, values), values)
    transports[0].send_all((), push(0, 8, values), values)
    transports[0].network.pump()
    assert {peer: [chunk for chunk, _ in seen] for peer, seen in got.items()} == {0: [], 1: [7], 2: [], 3: [7]}
    assert (transports[0].stats.sent_messages, transports[0].stats.sent_bytes) == (2, 24)
    with pytest.raises(WireError, match="cannot send to rank 4; there are 4 ranks"):
        transports[0].send_all((1, 4), push(0, 9, values), values)
    assert transports[0].network.pump() == 0, "to nobody, if not to all"
