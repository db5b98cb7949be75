"""Transports that talk over loopback: both carriers must keep the same contract."""

import os
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from poseidon.errors import ConfigError, FrameError, WireError
from poseidon.wire.message import Header, Kind
from poseidon.wire.open import open_transport
from poseidon.wire.outbox import Outgoing
from poseidon.wire.settings import WireSettings
from poseidon.wire.share import BufferShare
from poseidon.wire.tcp import PeerSender
from ranks import run_ranks

SECRET = b"a secret of the tests, quite long"
WAIT_S = 30

CARRIERS = {
    "tcp": {"carrier": "tcp"},
    "tcp, 2 streams": {"carrier": "tcp", "streams_per_peer": 2, "payload_checksum": True},
    "zeromq": {"carrier": "zeromq"},
    "zeromq, 2 streams": {
        "carrier": "zeromq",
        "streams_per_peer": 2,
        "receive_threads": 2,
        "in_flight_bytes": 1 << 20,
        "payload_checksum": True,
    },
    "encrypted": {"encrypt": True},
    "capped tcp": {"carrier": "tcp", "cap_mbit": 400},
    "capped zeromq": {"carrier": "zeromq", "cap_mbit": 400},
}


@pytest.fixture(params=CARRIERS)
def settings(request):
    return WireSettings(**CARRIERS[request.param])


@pytest.fixture(params=["tcp", "zeromq"])
def plain(request):
    return WireSettings(carrier=request.param)


@contextmanager
def network(size, settings, prepare=list):
    """Connected transports; ``prepare`` is called between listening and connecting. No thread outlives it."""
    with ExitStack() as stack:
        transports = [open_transport(rank, size, SECRET, settings) for rank in range(size)]
        for transport in transports:
            stack.callback(transport.close)
        prepare(transports)
        addresses = [transport.address for transport in transports]
        for transport in transports:
            transport.connect(addresses)
        yield transports
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("poseidon-wire")] == []


class Inbox:
    """Messages as they come, and a way to wait for them."""

    def __init__(self, transport, kind=Kind.PART, placer=None):
        self.messages = []
        self._came = threading.Condition()
        transport.listen(kind, self._take, placer)

    def _take(self, header, payload):
        with self._came:
            self.messages.append((header, np.frombuffer(payload, np.float32)))
            self._came.notify_all()

    def wait(self, count):
        with self._came:
            assert self._came.wait_for(lambda: len(self.messages) >= count, WAIT_S), f"{len(self.messages)} of {count}"
        return self.messages


def push(sender, chunk, values, clock=0):
    return Header(Kind.PART, sender, 0, chunk, clock, values.nbytes)


def values_of(sender, receiver, chunk, count):
    return np.arange(count, dtype=np.float32) + 1000 * sender + 100 * receiver + chunk


def test_everybody_reaches_everybody(settings):
    sizes = [0, 1, 1000, 4096, 100_000, 300_000]
    inboxes, sent = [], []
    with network(3, settings, lambda transports: inboxes.extend(map(Inbox, transports))) as transports:
        for sender, transport in enumerate(transports):
            for receiver in range(3):
                for chunk, count in enumerate(sizes):
                    values = values_of(sender, receiver, chunk, count)
                    transport.send(receiver, push(sender, chunk, values), values, on_sent=lambda: sent.append(1))
        for receiver, inbox in enumerate(inboxes):
            messages = inbox.wait(3 * len(sizes))
            assert {(header.sender, header.number) for header, _ in messages} == {
                (sender, chunk) for sender in range(3) for chunk in range(len(sizes))
            }
            for header, values in messages:
                expected = values_of(header.sender, receiver, header.number, sizes[header.number])
                assert np.array_equal(values, expected)
    assert len(sent) == 9 * len(sizes)
    total = 3 * sum(sizes) * 4
    for transport in transports:
        assert (transport.stats.sent_bytes, transport.stats.received_bytes) == (total, total)
        assert transport.stats.refused == {}


def test_a_payload_may_change_once_it_is_sent(settings):
    inboxes = []
    with network(2, settings, lambda transports: inboxes.extend(map(Inbox, transports))) as transports:
        values = np.empty(200_000, np.float32)
        sent = threading.Semaphore(0)
        for chunk in range(20):
            values[:] = chunk
            transports[0].send(1, push(0, chunk, values), values, on_sent=sent.release)
            assert sent.acquire(timeout=WAIT_S)
            values[:] = -1
        for header, received in inboxes[1].wait(20):
            assert (received == header.number).all()


def test_urgent_messages_overtake_queued_ones(plain):
    order, gate, finished = [], threading.Event(), threading.Event()
    count = 96

    def slowly(header, payload):
        gate.wait(WAIT_S)
        order.append(header.number)
        if len(order) == count + 1:
            finished.set()

    values = np.zeros(1 << 18, np.float32)
    with network(2, plain, lambda transports: transports[1].listen(Kind.PART, slowly)) as transports:
        for chunk in range(count):
            transports[0].send(1, push(0, chunk, values), values, priority=chunk + 1)
        transports[0].send(1, push(0, count, values), values, priority=0)
        gate.set()
        assert finished.wait(WAIT_S)
    # What the kernel and the receiver hold already cannot be overtaken; that is far less than all of it.
    assert order.index(count) < count // 2
    assert [chunk for chunk in order if chunk != count] == list(range(count))


def test_what_is_queued_leaves_before_close_returns(settings):
    inboxes = []
    values = np.ones(100_000, np.float32)
    with network(2, settings, lambda transports: inboxes.extend(map(Inbox, transports))) as transports:
        for chunk in range(30):
            transports[0].send(1, push(0, chunk, values), values)
        transports[0].close()
        assert {header.number for header, _ in inboxes[1].wait(30)} == set(range(30))
        with pytest.raises(WireError, match="rank 0 cannot send PART to rank 1: its transport is closed"):
            transports[0].send(1, push(0, 0, values), values)


def test_payloads_land_where_the_receiver_says(plain):
    landing = np.zeros((4, 50_000), np.float32)
    inboxes = []

    def place(header):
        if header.number == 9:
            raise FrameError("clock", "not wanted")
        return landing[header.number].data.cast("B") if header.number < 4 else None

    def prepare(transports):
        inboxes.append(Inbox(transports[1], placer=place))

    with network(2, plain, prepare) as transports:
        for chunk in (0, 9, 1, 7, 2, 3):
            values = np.full(50_000, chunk + 1, np.float32)
            transports[0].send(1, push(0, chunk, values), values)
        short = np.zeros(8, np.float32)
        transports[0].send(1, push(0, 2, short), short)
        transports[0].send(1, push(0, 5, short), short)
        messages = inboxes[0].wait(6)
    assert [header.number for header, _ in messages] == [0, 1, 7, 2, 3, 5]
    for chunk in range(4):
        assert (landing[chunk] == chunk + 1).all()
    assert np.shares_memory(messages[0][1], landing)
    assert transports[1].stats.refused == {"clock": 1, "length": 1}


def test_bad_messages_of_a_peer_are_counted_and_the_rest_goes_on(plain, caplog):
    inboxes, seen = [], threading.Event()

    def fail(header, payload):
        seen.set()
        raise ZeroDivisionError("a bug in a handler")

    def prepare(transports):
        inboxes.extend(map(Inbox, transports))
        transports[1].listen(Kind.INC, fail)

    with network(2, plain, prepare) as transports:
        values = np.zeros(4, np.float32)
        transports[0].send(1, Header(Kind.CLOCK, 0, 0, 0, 0, 0))
        transports[0].send(1, Header(Kind.CLOCK, 0, 0, 0, 0, 0))
        transports[0].send(1, Header(Kind.INC, 0, 0, 0, 0, 0))
        assert seen.wait(WAIT_S)
        transports[0].send(1, push(0, 1, values), values)
        inboxes[1].wait(1)
    assert transports[1].stats.refused == {"unheard": 2, "handler": 1}
    assert sum("to which nothing listens" in record.message for record in caplog.records) == 1
    assert "a bug in a handler" in caplog.text


def test_a_message_in_another_name_is_refused(plain):
    told = threading.Event()
    inboxes = []

    def prepare(transports):
        inboxes.extend(map(Inbox, transports))
        transports[1].listen(Kind.CLOCK, lambda *_: told.set())

    with network(3, plain, prepare) as transports:
        values = np.zeros(4, np.float32)
        transports[0].send(1, push(2, 1, values), values)
        transports[2].send(1, push(2, 3, values), values)
        assert [header.number for header, _ in inboxes[1].wait(1)] == [3]
        if plain.carrier == "zeromq":
            transports[0].send(1, Header(Kind.CLOCK, 0, 0, 0, 0, 0))
            assert told.wait(WAIT_S)
    assert transports[1].stats.refused == {"sender": 1}


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("carrier", ["tcp", "zeromq"])
def test_nobody_speaks_without_the_secret(carrier, encrypt):
    settings = WireSettings(carrier=carrier, encrypt=encrypt, connect_timeout_s=2)
    with ExitStack() as stack:
        good = open_transport(0, 2, SECRET, settings)
        bad = open_transport(1, 2, b"another secret, as long as ours", settings)
        stack.callback(good.close)
        stack.callback(bad.close)
        says = "rank 0 .*refused rank 1|rank 1 could not connect to ranks \\[0\\]"
        with pytest.raises(WireError, match=says):
            bad.connect([good.address, bad.address])
        if not encrypt:
            # Counted on the thread that turned it away, which may be a moment behind.
            deadline = time.monotonic() + 20
            while not good.stats.refused["wrong secret"] and time.monotonic() < deadline:
                time.sleep(0.01)
            assert good.stats.refused["wrong secret"] >= 1
        with pytest.raises(WireError, match="is not connected yet"):
            bad.send(0, Header(Kind.PART, 1, 0, 0, 0, 0))


def test_wrong_use_is_refused(plain):
    with network(1, WireSettings(carrier=plain.carrier, max_message_bytes=4096)) as (alone,):
        values = np.zeros(5000, np.uint8)
        with pytest.raises(WireError, match="5000 bytes; the wire's limit is 4096"):
            alone.send(0, push(0, 0, values), values)
        with pytest.raises(WireError, match="was given 2 addresses for 1 ranks"):
            alone.connect([alone.address] * 2)
    alone.close()
    with pytest.raises(WireError, match="cannot listen on 192\\.0\\.2\\.1"):
        open_transport(0, 1, SECRET, WireSettings(carrier=plain.carrier, ip="192.0.2.1"))


def test_a_peer_that_is_not_there_is_named(plain):
    gone = open_transport(1, 2, SECRET, plain)
    address = gone.address
    gone.close()
    settings = WireSettings(carrier=plain.carrier, connect_timeout_s=1)
    transport = open_transport(0, 2, SECRET, settings)
    try:
        with pytest.raises(WireError, match="rank 0 could not connect to rank"):
            transport.connect([transport.address, address])
    finally:
        transport.close()


def lose_one(carrier):
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    transport = open_transport(rank, size, SECRET, WireSettings(carrier=carrier))
    lost, told = [], threading.Event()

    def tell(peer, why):
        lost.append((peer, why))
        told.set()

    transport.listen_lost(tell)
    addresses = [""] * size
    dist.all_gather_object(addresses, transport.address)
    transport.connect(addresses)
    dist.barrier()
    if rank == 2:
        os._exit(1)
    assert told.wait(WAIT_S)
    transport.close()
    return [peer for peer, _ in lost], lost[0][1]


@pytest.mark.parametrize("carrier", ["tcp", "zeromq"])
def test_a_peer_that_dies_is_reported_once(carrier):
    results = run_ranks(lose_one, 3, carrier, lost=[2])
    assert [result[0] for result in results[:2]] == [[2], [2]]
    assert all(result[1] for result in results[:2])


def test_a_goodbye_is_no_loss(settings):
    lost = []

    def prepare(transports):
        for transport in transports:
            transport.listen_lost(lambda peer, why: lost.append((peer, why)))

    with network(3, settings, prepare) as transports:
        transports[1].close()
    assert lost == []


def test_tcp_does_not_pretend_to_encrypt():
    from poseidon.wire.tcp import TcpTransport

    with pytest.raises(ConfigError, match="choose the zeromq carrier"):
        TcpTransport(0, 1, SECRET, WireSettings(encrypt=True))


def test_a_connection_has_the_buffer_that_its_peer_shall_have():
    ours, theirs = socket.socketpair()
    broken = []
    share = BufferShare(10_000, range(1, 4))
    line = PeerSender(1, [ours], None, share, lambda peer, why: broken.append((peer, why)))
    share.add(2, 1000)
    sent = threading.Event()
    line.put(Outgoing(b"head", memoryview(bytes(1000)), on_sent=sent.set))
    assert sent.wait(WAIT_S)
    # As much waits for 2 peers of 3: each gets (3 / 2) ** 4 times the usual, at most 3 times. The kernel doubles it.
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 30_000
    assert share.buffer_bytes(2) == 30_000, "what was sent still counts"
    theirs.close()
    while not broken:
        line.put(Outgoing(b"head", memoryview(bytes(1000))))
    line.join(time.monotonic() + WAIT_S)
    assert broken[0][0] == 1
    assert share.buffer_bytes(2) == 2 * 10_000, "two peers are left, and only one has something to send"
