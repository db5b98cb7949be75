"""Strangers and broken peers throw bytes at a listener while two honest ranks go on talking.

For five seconds on a plain and on an encrypted wire, a minute at night.
"""

import errno
import os
import random
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

import nightly
from poseidon.errors import FrameError
from poseidon.wire import door
from poseidon.wire.address import Address
from poseidon.wire.handshake import Credentials
from poseidon.wire.message import CHECKED, SIZE, Header, Kind, pack
from poseidon.wire.settings import WireSettings
from poseidon.wire.tcp import TcpTransport

SECRET = b"a secret of the tests, quite long"
FUZZ_S = nightly.amount(5.0, 60.0)
LIMIT = 1 << 20
FLAT_BYTES = 48 << 20
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def good_header(**fields):
    values = {"kind": Kind.PART, "sender": 2, "subject": 1, "number": 2, "clock": 3, "length": 8} | fields
    return Header(**values)


def bad_heads(chance):
    """Headers that no honest sender writes; each with what comes behind it."""
    garbled = bytearray(pack(good_header()))
    garbled[chance.randrange(SIZE)] ^= chance.randrange(1, 256)
    unknown = bytearray(pack(good_header())[:-4])
    unknown[3] = 200
    return [
        (bytes(garbled), bytes(8)),
        (bytes(unknown) + struct.pack("<I", zlib.crc32(unknown)), bytes(8)),
        (pack(good_header(length=chance.randrange(LIMIT + 1, 1 << 62))), bytes(64)),
        (pack(good_header(sender=1)), bytes(8)),
        (pack(good_header(flags=CHECKED, checksum=1)), bytes(8)),
        (pack(good_header(kind=Kind.STATE)), bytes(8)),
        (pack(good_header())[: chance.randrange(SIZE)], b""),
        (chance.randbytes(SIZE), bytes(8)),
    ]


def connect(address):
    return closing(socket.create_connection((address.ip, address.port), timeout=5))


def throw_bytes(address, chance):
    """Random bytes, or a handshake that turns into them, from somebody who knows nothing."""
    start = chance.choice([b"", CLIENT_HELLO[: chance.randrange(200)], b"poseidn1"])
    with connect(address) as stranger:
        stranger.sendall(start + chance.randbytes(chance.randrange(1, 20_000)))
        if chance.random() < 0.5:
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(0.05)
            stranger.recv(1000)


def misuse(address, chance):
    """A rank that knows the secret, or does not, and sends what it should not."""
    credentials = Credentials(SECRET if chance.random() < 0.7 else chance.randbytes(32), address.is_encrypted)
    with connect(address) as plain, closing(credentials.wrap(plain, is_listener=False)) as peer:
        credentials.enter(peer, 2, 0, time.monotonic() + 5)
        head, payload = chance.choice(bad_heads(chance))
        if chance.random() < 0.2:
            head, payload = pack(good_header(length=1000)), bytes(chance.randrange(1000))
        peer.sendall(head + payload)
        socket.socket.shutdown(peer, socket.SHUT_WR)
        # Until the listener has seen all of it and closed: memory in flight is not memory kept.
        while peer.recv(1000):
            pass


class Honest:
    """Ranks 0 and 1 of three, playing ping-pong while the fuzzer claims to be rank 2."""

    def __init__(self, encrypt, before=str):
        settings = WireSettings(encrypt=encrypt, max_message_bytes=LIMIT, close_timeout_s=2)
        self.ranks = [TcpTransport(rank, 3, SECRET, settings) for rank in range(3)]
        self.rounds = 0
        self._payload = np.arange(50_000, dtype=np.float32)
        self._came = threading.Semaphore(0)
        self.ranks[1].listen(Kind.PART, self._answer)
        self.ranks[0].listen(Kind.SUM, self._take)
        # A forged PART is checked like any other message, and gets as far as this.
        self.ranks[0].listen(Kind.PART, lambda *_: None)
        addresses = [rank.address for rank in self.ranks]
        before(Address.parse(addresses[0]))
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda rank: rank.connect(addresses), self.ranks))

    def _answer(self, header, payload):
        self.ranks[1].send(0, Header(Kind.SUM, 1, 0, 0, header.clock, len(payload)), payload)

    def _take(self, _header, payload):
        assert np.array_equal(np.frombuffer(payload, np.float32), self._payload)
        self._came.release()

    def play(self):
        self.rounds += 1
        header = Header(Kind.PART, 0, 0, 0, self.rounds, self._payload.nbytes)
        self.ranks[0].send(1, header, self._payload)
        assert self._came.acquire(timeout=20), f"round {self.rounds} came to nothing"

    def close(self):
        for rank in self.ranks:
            rank.close()


def attack(honest, chance):
    address = Address.parse(honest.ranks[0].address)
    with suppress(OSError, FrameError):
        chance.choice([throw_bytes, misuse, misuse])(address, chance)


REASONS = {
    "handshake",
    "wrong secret",
    "header checksum",
    "kind",
    "length",
    "sender",
    "payload checksum",
    "unheard",
} | {
    "magic",
    "truncated",
}


@pytest.mark.timeout(FUZZ_S + 90)
@pytest.mark.parametrize("encrypt", [False, True])
def test_bad_frames_are_refused_and_nothing_else_happens(encrypt, caplog):
    chance = random.Random(4)
    honest = Honest(encrypt)
    try:
        began = time.monotonic()
        before, attacks = 0, 0
        while (elapsed := time.monotonic() - began) < FUZZ_S:
            attack(honest, chance)
            attacks += 1
            if attacks % 10 == 0:
                honest.play()
            if not before and elapsed > FUZZ_S / 4:
                before = resident_bytes()
        honest.play()
        grown = resident_bytes() - before
        refused = honest.ranks[0].stats.refused
    finally:
        honest.close()
    assert attacks > 50
    assert set(refused) >= REASONS
    assert "handler" not in refused
    assert grown < FLAT_BYTES, f"{grown >> 20} MiB more after {attacks} attacks"
    for reason in refused:
        assert refused[reason] >= 1
    told = [record.getMessage() for record in caplog.records if "refused:" in record.getMessage()]
    ours = [text for text in told if text.startswith("rank 0")]
    assert len(ours) == len(refused), "each reason is told once"
    assert honest.ranks[1].stats.refused == {}


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_crowd_of_silent_strangers_keeps_nobody_out(encrypt, monkeypatch):
    monkeypatch.setattr(door, "HANDSHAKE_S", 1.0)
    crowd = []

    def gather(address):
        crowd.extend(socket.create_connection((address.ip, address.port), timeout=5) for _ in range(150))

    honest = Honest(encrypt, gather)
    try:
        honest.play()
        gather(Address.parse(honest.ranks[0].address))
        honest.play()
    finally:
        for stranger in crowd:
            stranger.close()
        honest.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_byte_now_and_then_does_not_keep_a_door_open(encrypt, monkeypatch):
    """One limit for the whole handshake: it ends however the bytes come."""
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.5)
    with closing(TcpTransport(0, 2, SECRET, WireSettings(encrypt=encrypt))) as transport:
        with connect(Address.parse(transport.address)) as stranger:
            began = time.monotonic()
            stranger.settimeout(0.05)
            ended = False
            data = iter(CLIENT_HELLO if encrypt else b"poseidn1" + bytes(200))
            while not ended:
                assert time.monotonic() - began < 20, "it may go on for ever"
                with suppress(TimeoutError):
                    try:
                        stranger.sendall(bytes([next(data)]))
                        ended = stranger.recv(100) == b""
                    except (ConnectionError, StopIteration):
                        ended = True
        while not transport.stats.refused:  # counted by the thread that gave up, which may be a moment behind
            assert time.monotonic() - began < 20
        assert sum(transport.stats.refused.values()) == 1


def test_strangers_of_other_addresses_get_no_handshake():
    honest = Honest(False)
    try:
        address = Address.parse(honest.ranks[0].address)
        stranger = socket.create_connection((address.ip, address.port), 5, ("127.0.0.2", 0))
        with closing(stranger), suppress(ConnectionError):
            assert stranger.recv(100) == b"", "it was challenged"
        honest.play()
        assert honest.ranks[0].stats.refused == {"stranger": 1}
    finally:
        honest.close()


def test_a_shortage_of_files_does_not_end_the_accepting_thread(monkeypatch):
    monkeypatch.setattr(door, "RETRY_S", 0.01)
    with closing(TcpTransport(0, 1, SECRET)) as transport:
        shortages = iter([OSError(errno.EMFILE, "Too many open files")] * 3)

        class Short(socket.socket):
            def accept(self):
                for shortage in shortages:
                    raise shortage
                return super().accept()

        transport._door._listener = Short(fileno=transport._door._listener.detach())
        # The thread is in the real one's accept; the first stranger takes it out of there.
        for _ in range(2):
            with connect(Address.parse(transport.address)) as stranger:
                assert len(stranger.recv(100)) == 24
        transport.connect([transport.address])
        assert transport.stats.refused["accept"] >= 3
