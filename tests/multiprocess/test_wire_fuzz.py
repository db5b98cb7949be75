"""Strangers and broken peers throw bytes at a listener while two honest ranks go on talking.

For five seconds on each carrier, a minute at night.
"""

import os
import random
import socket
import struct
import threading
import time
import zlib
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import zmq

import nightly
from poseidon.errors import FrameError
from poseidon.wire import tcp
from poseidon.wire.address import Address
from poseidon.wire.handshake import claim
from poseidon.wire.message import CHECKED, SIZE, Header, Kind, pack
from poseidon.wire.open import open_transport
from poseidon.wire.secret import JobSecret
from poseidon.wire.settings import WireSettings

SECRET = b"a secret of the tests, quite long"
FUZZ_S = nightly.amount(5.0, 60.0)
LIMIT = 1 << 20
FLAT_BYTES = 48 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


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
    return closing(socket.create_connection((address.ip, address.ports[0]), timeout=5))


def throw_bytes(address, chance):
    """Random bytes, or a handshake that turns into them, from somebody who knows nothing."""
    start = chance.choice([b"", GREETING[: chance.randrange(65)], GREETING + b"\x06\xff" + b"\x7f" * 8])
    with connect(address) as stranger:
        stranger.sendall(start + chance.randbytes(chance.randrange(1, 20_000)))
        if chance.random() < 0.5:
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(0.05)
            stranger.recv(1000)


def misuse_tcp(address, chance):
    secret = JobSecret(SECRET if chance.random() < 0.7 else chance.randbytes(32))
    with connect(address) as peer:
        claim(peer, secret, 2, 0)
        head, payload = chance.choice(bad_heads(chance))
        if chance.random() < 0.2:
            head, payload = pack(good_header(length=1000)), bytes(chance.randrange(1000))
        peer.sendall(head + payload)
        peer.shutdown(socket.SHUT_WR)
        # Until the listener has seen all of it and closed: memory in flight is not memory kept.
        while peer.recv(1000):
            pass


def misuse_zeromq(address, chance):
    knows = chance.random() < 0.7
    secret = JobSecret(SECRET if knows else chance.randbytes(32))
    context = zmq.Context.instance()
    with context.socket(zmq.PUSH) as peer:
        peer.linger = 200
        peer.immediate = True
        peer.sndtimeo = 500 if knows else 50
        peer.plain_username = b"2"
        peer.plain_password = secret.password(address.nonce, 2, 0).encode()
        peer.connect(f"tcp://{address.ip}:{address.ports[0]}")
        for head, payload in chance.sample(bad_heads(chance), 4):
            extra = [b"third"] * (chance.random() < 0.3)
            peer.send_multipart([head, payload, *extra] if chance.random() < 0.9 else [head])
        if chance.random() < 0.1:
            peer.send_multipart([pack(good_header(length=2 * LIMIT)), bytes(2 * LIMIT)])


class Honest:
    """Ranks 0 and 1 of three, playing ping-pong while the fuzzer claims to be rank 2."""

    def __init__(self, carrier, before=str):
        settings = WireSettings(carrier=carrier, max_message_bytes=LIMIT, close_timeout_s=2)
        self.ranks = [open_transport(rank, 3, SECRET, settings) for rank in range(3)]
        self.rounds = 0
        self._payload = np.arange(50_000, dtype=np.float32)
        self._came = threading.Semaphore(0)
        self.ranks[1].listen(Kind.PART, self._answer)
        self.ranks[0].listen(Kind.SUM, self._take)
        # A forged PART is checked like any other message, and gets as far as this.
        self.ranks[0].listen(Kind.PART, lambda *_: None)
        addresses = [rank.address for rank in self.ranks]
        before(Address.parse(addresses[0]))
        for rank in self.ranks:
            rank.connect(addresses)

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


def attack(honest, carrier, chance):
    address = Address.parse(honest.ranks[0].address)
    misuse = misuse_tcp if carrier == "tcp" else misuse_zeromq
    with suppress(OSError, FrameError, zmq.ZMQError):
        chance.choice([throw_bytes, misuse, misuse])(address, chance)


REASONS = {
    "tcp": {"handshake", "wrong secret", "header checksum", "kind", "length", "sender", "payload checksum", "unheard"}
    | {"magic", "truncated"},
    "zeromq": {"handshake", "wrong secret", "header checksum", "kind", "length", "sender", "payload checksum"}
    | {"unheard", "magic", "header size", "parts"},
}


@pytest.mark.timeout(FUZZ_S + 90)
@pytest.mark.parametrize("carrier", ["tcp", "zeromq"])
def test_bad_frames_are_refused_and_nothing_else_happens(carrier, caplog):
    chance = random.Random(4)
    honest = Honest(carrier)
    try:
        began = time.monotonic()
        before, attacks = 0, 0
        while (elapsed := time.monotonic() - began) < FUZZ_S:
            attack(honest, carrier, chance)
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
    assert REASONS[carrier] <= set(refused)
    assert "handler" not in refused
    assert grown < FLAT_BYTES, f"{grown >> 20} MiB more after {attacks} attacks"
    for reason in refused:
        assert refused[reason] >= 1
    told = [record.getMessage() for record in caplog.records if "refused:" in record.getMessage()]
    ours = [text for text in told if text.startswith("rank 0")]
    assert len(ours) == len(refused), "each reason is told once"
    assert honest.ranks[1].stats.refused == {}


@pytest.mark.parametrize("carrier", ["tcp", "zeromq"])
def test_a_crowd_of_silent_strangers_keeps_nobody_out(carrier, monkeypatch):
    monkeypatch.setattr(tcp, "HANDSHAKE_S", 1.0)
    crowd = []

    def gather(address):
        crowd.extend(socket.create_connection((address.ip, address.ports[0]), timeout=5) for _ in range(150))

    honest = Honest(carrier, gather)
    try:
        honest.play()
        gather(Address.parse(honest.ranks[0].address))
        honest.play()
    finally:
        for stranger in crowd:
            stranger.close()
        honest.close()
