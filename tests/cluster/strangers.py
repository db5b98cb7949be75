"""What a stranger tries on a listening port: every way to disturb, to get in, or to learn something.

``strangers.py PLAN``: PLAN is a file of JSON with ``places`` (pairs of address and port), ``recorded`` (files with what
somebody said to such a port before) and ``seconds``. Prints JSON: for every kind of attack how often it was made, and
the longest answer to it; and under ``let in`` the attacks after which the other end went on listening to us.
"""

from __future__ import annotations

import json
import os
import select
import socket
import ssl
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from poseidon.errors import WireError
from poseidon.wire.handshake import Credentials
from poseidon.wire.message import MAGIC, SIZE, VERSION

Place = tuple[str, int]
_WRONG = b"a secret that somebody made up"
_STORE_MAGIC = 0x3C85F7CE
"""With which torch's store expects its clients to begin."""
ANSWER_S = 0.5
CROWD = 200


class Stranger:
    """Attacks some places until a time is over."""

    def __init__(self, places: Sequence[Place], recorded: Sequence[bytes], seconds: float) -> None:
        self._places = places
        self._recorded = recorded
        self._deadline = time.monotonic() + seconds
        self.attacks: Counter[str] = Counter()
        self.longest: Counter[str] = Counter()
        self.let_in: set[str] = set()
        self._lock = threading.Lock()

    def run(self) -> None:
        kinds = (self.silent, self.drip, self.crowd, self.junk, self.wrong_secret, self.replay, self.forge)
        kinds += (self.downgrade, self.half)
        threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _repeat(self, attack: Callable[[Place], None]) -> None:
        while self._is_time:
            for place in self._places:
                if self._is_time:
                    # Whoever is turned away sees it in many ways.
                    with suppress(OSError, WireError, ValueError):
                        attack(place)

    @property
    def _is_time(self) -> bool:
        return time.monotonic() < self._deadline

    def _note(self, kind: str, answer: bytes = b"", is_in: bool = False) -> None:
        with self._lock:
            self.attacks[kind] += 1
            self.longest[kind] = max(self.longest[kind], len(answer))
            if is_in:
                self.let_in.add(kind)

    @contextmanager
    def _connected(self, place: Place) -> Iterator[socket.socket]:
        with closing(socket.create_connection(place, timeout=0.5)) as connection:
            connection.settimeout(2.0)
            yield connection

    def silent(self, place: Place) -> None:
        """Connect and say nothing, for as long as there is time."""
        with self._connected(place) as connection:
            self._note("silent")
            while self._is_time and not _is_over(connection):
                time.sleep(0.1)

    def drip(self, place: Place) -> None:
        """Say a byte per second."""
        with self._connected(place) as connection:
            self._note("drip")
            for byte in b"\x16\x03\x01\x02\x00" * 20:
                if not self._is_time or _is_over(connection):
                    break
                connection.send(bytes([byte]))
                time.sleep(1.0)

    def crowd(self, place: Place) -> None:
        """Open many connections at once, and keep them for a while."""
        crowd: list[socket.socket] = []
        try:
            with suppress(OSError):
                for _ in range(CROWD):
                    crowd.append(socket.create_connection(place, timeout=0.5))
            time.sleep(min(1.0, max(0.0, self._deadline - time.monotonic())))
        finally:
            for connection in crowd:
                connection.close()
        self._note("crowd")

    def junk(self, place: Place) -> None:
        """Say what means nothing; much of it."""
        with self._connected(place) as connection:
            with suppress(OSError):
                connection.sendall(os.urandom(1 << 16))
            self._note("junk", _answer(connection))

    def wrong_secret(self, place: Place) -> None:
        """Do all that a worker does, with another secret."""
        for encrypt in (False, True):
            credentials = Credentials(_WRONG, encrypt)
            with self._connected(place) as plain, closing(credentials.wrap(plain, is_listener=False)) as connection:
                is_in = True
                try:
                    credentials.enter(connection, 1, 0, time.monotonic() + 2)
                except (OSError, WireError):
                    is_in = False
                self._note("wrong secret", is_in=is_in)

    def replay(self, place: Place) -> None:
        """Say what a worker once said: its handshake, and what followed."""
        for stream in self._recorded:
            with self._connected(place) as connection:
                with suppress(OSError):
                    connection.sendall(stream)
                answer = _answer(connection)
                # A worker of a plain job answers a claim with a proof, 32 bytes that are not all zero, and stays.
                proof = answer[24:56]
                self._note("replay", answer, is_in=answer.startswith(b"poseidn1") and any(proof))

    def forge(self, place: Place) -> None:
        """Announce more bytes than there are in the world."""
        head = struct.pack("<2sBBBBHIQQQI", MAGIC, VERSION, 3, 0, 0, 1, 0, 0, 0, 1 << 63, 0)
        frame = head + struct.pack("<I", zlib.crc32(head))
        assert len(frame) == SIZE
        number = struct.pack("<QQI", 0, 1 << 63, 0)
        mesh = number + struct.pack("<I", zlib.crc32(number))
        store = struct.pack("<BI", 0, _STORE_MAGIC) + struct.pack("<BQ", 1, 1 << 40)
        claim = struct.pack("<8sHH16s32s", b"poseidn1", 1, 0, bytes(16), bytes(32))
        for message in (frame, mesh, store, claim + frame * 20, b"\x16\x03\x03\xff\xff" + bytes(100), b"\xff" * 64):
            with self._connected(place) as connection:
                with suppress(OSError):
                    connection.sendall(message)
                self._note("forge", _answer(connection))

    def downgrade(self, place: Place) -> None:
        """Speak an older TLS, or without a certificate."""
        for newest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.maximum_version = newest
            is_in = False
            with self._connected(place) as plain:
                connection = context.wrap_socket(plain, do_handshake_on_connect=False)
                with suppress(OSError):
                    connection.do_handshake()
                    # With TLS 1.3 the listener refuses only now; a worker's challenge would be an answer.
                    connection.sendall(bytes(100))
                    is_in = bool(connection.recv(1))
                self._note("downgrade", is_in=is_in)

    def half(self, place: Place) -> None:
        """Begin a handshake, then reset the connection."""
        hello = next((one[:100] for one in self._recorded), b"\x16\x03\x01\x00\xdc\x01\x00")
        with self._connected(place) as connection:
            connection.sendall(hello[: len(hello) // 2])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._note("half")


def _is_over(connection: socket.socket) -> bool:
    """Return whether the other end has closed a connection."""
    if not select.select([connection], [], [], 0)[0]:
        return False
    with suppress(BlockingIOError):
        return not connection.recv(1 << 16, socket.MSG_DONTWAIT)
    return False


def _answer(connection: socket.socket) -> bytes:
    """Return what comes within a short time."""
    answer = b""
    deadline = time.monotonic() + ANSWER_S
    with suppress(OSError):
        while (left_s := deadline - time.monotonic()) > 0:
            connection.settimeout(left_s)
            more = connection.recv(1 << 16)
            if not more:
                break
            answer += more
    return answer


def main(plan_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    recorded = [Path(path).read_bytes() for path in plan["recorded"]]
    stranger = Stranger([(ip, port) for ip, port in plan["places"]], recorded, plan["seconds"])
    stranger.run()
    told = {"attacks": stranger.attacks, "longest": stranger.longest, "let in": sorted(stranger.let_in)}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
