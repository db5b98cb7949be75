"""Transports that talk over loopback, plain and encrypted, and what they do with strangers and faults."""

import os
import queue
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import numpy as np
import psutil
import pytest

from poseidon.errors import FrameError, WireError
from poseidon.wire import tls
from poseidon.wire.address import Address
from poseidon.wire.message import CHECKED, Header, Kind
from poseidon.wire.sending import Outgoing, PeerSender
from poseidon.wire.settings import WireSettings
from poseidon.wire.share import BufferShare
from poseidon.wire.tcp import TcpTransport
from ranks import run_ranks

SECRET = b"a secret of the tests, quite long"
WAIT_S = 30

KINDS = {
    "plain": {},
    "2 streams": {"streams_per_peer": 2, "payload_checksum": True},
    "encrypted": {"encrypt": True},
    "encrypted, 2 streams": {"encrypt": True, "streams_per_peer": 2},
    "capped": {"cap_mbit": 400},
}


@pytest.fixture(params=KINDS)
def settings(request):
    return WireSettings(**KINDS[request.param])


@pytest.fixture(params=["plain", "encrypted"])
def kind(request):
    return WireSettings(encrypt=request.param == "encrypted")


def connect_all(transports, addresses):
    with ThreadPoolExecutor(len(transports)) as threads:
        list(threads.map(lambda transport: transport.connect(addresses), transports))


@contextmanager
def network(size, settings, prepare=list):
    """Connected transports; ``prepare`` is called between listening and connecting. No thread outlives it."""
    with ExitStack() as stack:
        transports = [TcpTransport(rank, size, SECRET, settings) for rank in range(size)]
        for transport in transports:
            stack.callback(transport.close)
        prepare(transports)
        addresses = [transport.address for transport in transports]
        connect_all(transports, addresses)
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


def test_urgent_messages_overtake_queued_ones(kind):
    order, gate, finished = [], threading.Event(), threading.Event()
    count = 96

    def slowly(header, payload):
        gate.wait(WAIT_S)
        order.append(header.number)
        if len(order) == count + 1:
            finished.set()

    values = np.zeros(1 << 18, np.float32)
    with network(2, kind, lambda transports: transports[1].listen(Kind.PART, slowly)) as transports:
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


def test_payloads_land_where_the_receiver_says(kind):
    landing = np.zeros((4, 50_000), np.float32)
    inboxes = []

    def place(header):
        return landing[header.number].data.cast("B") if header.number < 4 else None

    def prepare(transports):
        inboxes.append(Inbox(transports[1], placer=place))

    with network(2, kind, prepare) as transports:
        for chunk in (0, 1, 7, 2, 3):
            values = np.full(50_000, chunk + 1, np.float32)
            transports[0].send(1, push(0, chunk, values), values)
        messages = inboxes[0].wait(5)
    assert [header.number for header, _ in messages] == [0, 1, 7, 2, 3]
    for chunk in range(4):
        assert (landing[chunk] == chunk + 1).all()
    assert np.shares_memory(messages[0][1], landing)
    assert transports[1].stats.refused == {}


def refuse_to_place(header):
    raise FrameError("clock", "not wanted")


def fail_to_place(header):
    raise ZeroDivisionError("a bug in a placer")


def fail_to_handle(header, payload):
    raise ZeroDivisionError("a bug in a handler")


SHORT = np.zeros(8, np.float32)
FAULTS = {
    "unheard": (lambda _: None, Header(Kind.CLOCK, 0, 3, 4, 5, 0), "sent CLOCK, to which nothing listens"),
    "handler": (
        lambda t: t.listen(Kind.INC, fail_to_handle),
        Header(Kind.INC, 0, 3, 4, 5, 0),
        r"INC of rank 0 \(subject 3, number 4, step 5\) failed here: ZeroDivisionError: a bug in a handler",
    ),
    "placer refuses": (lambda t: t.listen(Kind.INC, print, refuse_to_place), Header(Kind.INC, 0, 3, 4, 5, 0), "not w"),
    "placer": (
        lambda t: t.listen(Kind.INC, print, fail_to_place),
        Header(Kind.INC, 0, 3, 4, 5, 0),
        r"INC of rank 0 \(subject 3, number 4, step 5\) failed here: ZeroDivisionError: a bug in a placer",
    ),
    "wrong room": (
        lambda t: t.listen(Kind.INC, print, lambda _: memoryview(bytearray(8))),
        Header(Kind.INC, 0, 3, 4, 5, 0),
        "8 bytes were expected",
    ),
    "checksum": (
        lambda t: t.listen(Kind.INC, print),
        Header(Kind.INC, 0, 3, 4, 5, 0, flags=CHECKED, checksum=1),
        r"INC of rank 0 \(subject 3, number 4, step 5\) was damaged on its way",
    ),
    "other name": (lambda t: t.listen(Kind.INC, print), Header(Kind.INC, 2, 3, 4, 5, 0), "in the name of 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("streams", [1, 2])
def test_a_fault_in_a_peers_message_loses_that_peer_at_once_and_says_why(fault, streams):
    """None passes in silence, on neither side, and closing takes no time afterwards."""
    install, header, says = FAULTS[fault]
    lost = [queue.Queue() for _ in range(3)]
    inboxes = []

    def prepare(transports):
        install(transports[1])
        inboxes.append(Inbox(transports[1]))
        for rank, transport in enumerate(transports):
            transport.listen_lost(lambda peer, why, rank=rank: lost[rank].put((peer, why)))

    with network(3, WireSettings(streams_per_peer=streams), prepare) as transports:
        transports[0].send(1, header)
        peer, why = lost[1].get(timeout=WAIT_S)
        assert peer == 0
        assert re.search(says, why)
        # The one who sent it hears of it too, with the next messages.
        while lost[0].empty():
            transports[0].send(1, push(0, 1, SHORT), SHORT)
        assert lost[0].get()[0] == 1
        transports[2].send(1, push(2, 3, SHORT), SHORT)
        assert inboxes[0].wait(1)[-1][0].sender in (0, 2)
        began = time.monotonic()
        for transport in transports:
            transport.close()
        assert time.monotonic() - began < 5
    assert lost[2].empty()


@pytest.mark.parametrize("encrypt", [False, True])
def test_nobody_speaks_without_the_secret(encrypt):
    settings = WireSettings(encrypt=encrypt, connect_timeout_s=2)
    with ExitStack() as stack:
        good = TcpTransport(0, 2, SECRET, settings)
        bad = TcpTransport(1, 2, b"another secret, as long as ours", settings)
        stack.callback(good.close)
        stack.callback(bad.close)
        addresses = [good.address, bad.address]
        with ThreadPoolExecutor(2) as threads:
            tries = [threads.submit(each.connect, addresses) for each in (good, bad)]
            for one in tries:
                with pytest.raises(WireError, match="secret; use the same on all workers"):
                    one.result()
        assert refused(good, "wrong secret")
        with pytest.raises(WireError, match="is not connected yet"):
            bad.send(0, Header(Kind.PART, 1, 0, 0, 0, 0))


def refused(transport, reason):
    """Counted on the thread that turned it away, which may be a moment behind."""
    deadline = time.monotonic() + 20
    while not transport.stats.refused[reason] and time.monotonic() < deadline:
        time.sleep(0.01)
    return transport.stats.refused[reason]


def test_one_end_alone_does_not_encrypt():
    plain, encrypted = (TcpTransport(rank, 2, SECRET, WireSettings(encrypt=bool(rank))) for rank in range(2))
    with closing(plain), closing(encrypted):
        addresses = [plain.address, encrypted.address]
        with pytest.raises(WireError, match="rank 0 does not encrypt and rank 1 does; set POSEIDON_WIRE_ENCRYPT"):
            plain.connect(addresses)
        with pytest.raises(WireError, match="rank 1 encrypts and rank 0 does not; set POSEIDON_WIRE_ENCRYPT"):
            encrypted.connect(addresses)


@pytest.mark.parametrize("encrypt", [False, True])
def test_an_address_that_lies_about_encryption_gets_nothing(encrypt):
    """Somebody who changes addresses on their way cannot make anybody speak in the clear."""
    settings = [WireSettings(encrypt=encrypt, connect_timeout_s=2), WireSettings(encrypt=not encrypt)]
    ours, theirs = (TcpTransport(rank, 2, SECRET, settings[rank]) for rank in range(2))
    with closing(ours), closing(theirs):
        lie = [theirs.address.removesuffix("/tls"), theirs.address.removesuffix("/tls") + "/tls"][encrypt]
        truth = [ours.address.removesuffix("/tls"), ours.address.removesuffix("/tls") + "/tls"][not encrypt]
        with ThreadPoolExecutor(2) as threads:
            one = threads.submit(ours.connect, [ours.address, lie])
            two = threads.submit(theirs.connect, [truth, theirs.address])
            with pytest.raises(WireError):
                one.result()
            ours.close()
            with pytest.raises(WireError):
                two.result()


@contextmanager
def tap(address, flip=None):
    """Somebody on the way to ``address``: where to connect instead, and all bytes that pass; one may be changed."""
    to = Address.parse(address)
    door = socket.create_server(("127.0.0.1", 0))
    seen, sockets, threads = [], [], []

    def pass_on(source, target, is_forward):
        count = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                seen.append(data)
                if is_forward and flip is not None and count <= flip < count + len(data):
                    data = bytearray(data)
                    data[flip - count] ^= 1
                count += len(data)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve():
        with suppress(OSError):
            while True:
                near, _ = door.accept()
                far = socket.create_connection((to.ip, to.port))
                sockets.extend((near, far))
                for pair in ((near, far, True), (far, near, False)):
                    threads.append(threading.Thread(target=pass_on, args=pair, daemon=True))
                    threads[-1].start()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        yield str(Address("127.0.0.1", door.getsockname()[1], to.is_encrypted)), seen
    finally:
        door.shutdown(socket.SHUT_RDWR)
        server.join()
        for each in (door, *sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for each in (door, *sockets):
            each.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_nothing_of_an_encrypted_message_can_be_read_on_the_way(encrypt):
    mark = b"the quick brown fox jumps over it. "
    transports = [TcpTransport(rank, 2, SECRET, WireSettings(encrypt=encrypt)) for rank in range(2)]
    inboxes = [Inbox(transport) for transport in transports]
    with tap(transports[1].address) as (address, seen), closing(transports[0]), closing(transports[1]):
        connect_all(transports, [transports[0].address, address])
        values = np.frombuffer(mark * 1000, np.uint8)
        transports[0].send(1, push(0, 1, values), values)
        assert inboxes[1].wait(1)[0][1].tobytes() == values.tobytes()
        passed = b"".join(seen)
    assert len(passed) > len(values)
    # The plain one shows that this would see it.
    assert (mark in passed) != encrypt
    assert SECRET not in passed


def test_a_bit_that_flips_on_the_way_loses_the_peer(monkeypatch):
    """Of an encrypted message any bit does; of a plain one those that a checksum covers."""
    which = r"PART of rank 0 \(subject 0, number 1, step 7\)"
    for settings, can_seal, says in (
        (WireSettings(encrypt=True), True, f"{which}: a part of a payload was changed on its way"),
        (WireSettings(encrypt=True), False, "DECRYPTION_FAILED|BAD_RECORD_MAC"),
        (WireSettings(payload_checksum=True), False, f"{which} was damaged"),
    ):
        if not can_seal:
            monkeypatch.setattr(tls, "find_cipher", lambda: None)
        transports = [TcpTransport(rank, 2, SECRET, settings) for rank in range(2)]
        inboxes, lost = [Inbox(transport) for transport in transports], queue.Queue()
        transports[1].listen_lost(lambda peer, why, lost=lost: lost.put((peer, why)))
        with tap(transports[1].address, 100_000) as (address, _), closing(transports[0]), closing(transports[1]):
            connect_all(transports, [transports[0].address, address])
            values = np.zeros(100_000, np.float32)
            transports[0].send(1, push(0, 1, values, clock=7), values)
            peer, why = lost.get(timeout=WAIT_S)
        assert peer == 0
        assert re.search(says, why)
        assert inboxes[1].messages == []


def test_wrong_use_is_refused(kind):
    with network(1, WireSettings(encrypt=kind.encrypt, max_message_bytes=4096)) as (alone,):
        values = np.zeros(5000, np.uint8)
        with pytest.raises(WireError, match="5000 bytes; the wire's limit is 4096"):
            alone.send(0, push(0, 0, values), values)
        with pytest.raises(WireError, match="was given 2 addresses for 1 ranks"):
            alone.connect([alone.address] * 2)
    alone.close()
    with pytest.raises(WireError, match="cannot listen on 192\\.0\\.2\\.1"):
        TcpTransport(0, 1, SECRET, WireSettings(encrypt=kind.encrypt, ip="192.0.2.1"))


def test_a_peer_that_is_not_there_is_named(kind):
    gone = TcpTransport(1, 2, SECRET, kind)
    address = gone.address
    gone.close()
    settings = WireSettings(encrypt=kind.encrypt, connect_timeout_s=1)
    transport = TcpTransport(0, 2, SECRET, settings)
    try:
        with pytest.raises(WireError, match="rank 0 could not connect to rank"):
            transport.connect([transport.address, address])
    finally:
        transport.close()


def lose_one(streams):
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    transport = TcpTransport(rank, size, SECRET, WireSettings(streams_per_peer=streams))
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


@pytest.mark.parametrize("streams", [1, 2])
def test_a_peer_that_dies_is_reported_once(streams):
    results = run_ranks(lose_one, 3, streams, lost=[2])
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


def close_before_one_that_does_not_read(streams):
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    transport = TcpTransport(rank, size, SECRET, WireSettings(streams_per_peer=streams, close_timeout_s=1.0))
    addresses = [""] * size
    dist.all_gather_object(addresses, transport.address)
    transport.connect(addresses)
    processes = [0] * size
    dist.all_gather_object(processes, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while psutil.Process(processes[1]).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    for number in range(16):
        transport.send(1, Header(Kind.PART, rank, 0, number, 0, 4 << 20), bytes(4 << 20))
    began = time.monotonic()
    transport.close()
    return time.monotonic() - began


@pytest.mark.parametrize("streams", [1, 2])
def test_close_does_not_wait_for_a_peer_that_does_not_read(streams):
    seconds = run_ranks(close_before_one_that_does_not_read, 2, streams, lost=[1])[0]
    # The limit, then a second for the threads of either direction to notice that they were cut; and a busy machine.
    assert 1.0 <= seconds < 10.0
