"""Everything that crosses the switch of a lab, as an eavesdropper there would have it, and a search in it.

::

    with Lab(machines=2) as lab, Eavesdropper(lab) as heard:
        ...
    streams = heard.streams()

Nothing but raw sockets is needed. A capture that lost a packet, or a stream with a hole, is an error: what was not
heard cannot be said to be unreadable.
"""

from __future__ import annotations

import re
import select
import socket
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from poseidon.lab import Lab
from poseidon.lab.namespace import call_inside
from poseidon.wire.sealing import SEALED_BYTES

_ALL_PROTOCOLS = 0x0003
_PACKET_STATISTICS = 6
_SOL_PACKET = 263
_SO_RCVBUFFORCE = 33
_HELD_BYTES = 256 << 20
_DRAIN_S = 2.0
"""For what is recorded already; others may go on talking."""
_LARGEST_FRAME = 1 << 17
_WINDOW = 8
"""Bytes that count as found: two float32 values, or four of half precision."""


class End(NamedTuple):
    """One end of a connection."""

    address: str
    port: int


class Flow(NamedTuple):
    """One direction of a connection."""

    source: End
    target: End


class Eavesdropper:
    """Records every frame that enters the switch of a lab, from ``__enter__`` to ``__exit__``."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._sockets: list[socket.socket] = []
        self._frames: list[bytes] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._record, name="eavesdropper", daemon=True)
        self._until = 0.0
        self.lost = 0

    def __enter__(self) -> Eavesdropper:
        self._lab._in_switch(lambda switch: call_inside([switch], self._open))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._until = time.monotonic() + _DRAIN_S
        self._ended.set()
        self._thread.join()
        for one in self._sockets:
            self.lost += struct.unpack("II", one.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1]
            one.close()

    def _open(self) -> None:
        for machine in range(self._lab.machines):
            one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
            one.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _HELD_BYTES)
            one.bind((f"port{machine}", _ALL_PROTOCOLS))
            one.setblocking(False)
            self._sockets.append(one)

    def _record(self) -> None:
        while True:
            ready, _, _ = select.select(self._sockets, [], [], 0.05)
            for one in ready:
                frame, address = one.recvfrom(_LARGEST_FRAME)
                # Each frame once: where it enters the switch, not where it leaves.
                if address[2] != socket.PACKET_OUTGOING:  # type: ignore[attr-defined]
                    self._frames.append(frame)
            if self._ended.is_set() and (not ready or time.monotonic() > self._until):
                return

    def streams(self) -> dict[Flow, list[bytes]]:
        """Return what was said in each direction of each connection; several if its ports were used again."""
        assert self.lost == 0, f"the capture lost {self.lost} frames"
        return reassemble(self._frames)


def reassemble(frames: Iterable[bytes]) -> dict[Flow, list[bytes]]:
    """Return the bytes of all TCP streams in Ethernet frames; ``AssertionError`` if one has a hole."""
    pieces: dict[Flow, list[dict[int, bytes]]] = defaultdict(list)
    starts: dict[Flow, int] = {}
    for frame in frames:
        segment = _parse(frame)
        if segment is None:
            continue
        flow, number, is_first, data = segment
        if is_first:
            number = (number + 1) % 2**32
            if starts.get(flow) != number:
                starts[flow] = number
                pieces[flow].append({})
        if data and flow in starts:
            place = (number - starts[flow]) % 2**32
            if place < 2**31 and len(data) > len(pieces[flow][-1].get(place, b"")):
                pieces[flow][-1][place] = data
    return {flow: [_join(one, flow) for one in all_of_it] for flow, all_of_it in pieces.items()}


def _join(pieces: Mapping[int, bytes], flow: Flow) -> bytes:
    whole = bytearray()
    for place, data in sorted(pieces.items()):
        # A probe of a silent connection repeats the byte before the first.
        assert place <= len(whole) or place == 2**32 - 1, f"the capture of {flow} has a hole at {len(whole)}"
        whole += data[len(whole) - place :]
    return bytes(whole)


def _parse(frame: bytes) -> tuple[Flow, int, bool, bytes] | None:
    kind = frame[12:14]
    if kind == b"\x08\x00":
        head, end = 14 + 4 * (frame[14] & 15), 14 + int.from_bytes(frame[16:18], "big")
        protocol, family = frame[23], socket.AF_INET
        source, target = frame[26:30], frame[30:34]
    elif kind == b"\x86\xdd":
        head, end = 54, 54 + int.from_bytes(frame[18:20], "big")
        protocol, family = frame[20], socket.AF_INET6
        source, target = frame[22:38], frame[38:54]
    else:
        return None
    if protocol != socket.IPPROTO_TCP:
        return None
    if end == (54 if family == socket.AF_INET6 else 14):
        end = len(frame)  # more than its length field can say
    from_port, to_port, number = struct.unpack_from("!HHI", frame, head)
    begin = head + 4 * (frame[head + 12] >> 4)
    ends = (End(socket.inet_ntop(family, ip), port) for ip, port in ((source, from_port), (target, to_port)))
    return Flow(*ends), number, bool(frame[head + 13] & 2), frame[begin:end]


# What to look for.


def windows_of(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return the pieces of an array that give it away when they are found: every 8 bytes that are no coincidence."""
    flat = np.ascontiguousarray(values).reshape(-1)
    forms = [flat]
    if flat.dtype == np.float32:
        # Weights may travel in half precision.
        bits = flat.view(np.uint32)
        forms.append(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
        forms.append(flat.astype(np.float16))
    found = []
    for form in forms:
        data = form.tobytes()
        usable = len(data) // _WINDOW * _WINDOW
        pieces = np.frombuffer(data[:usable], np.uint8).reshape(-1, _WINDOW)
        # Zeros and small numbers are everywhere.
        is_telling = (pieces != 0).sum(1) >= 6
        found.append(np.ascontiguousarray(pieces[is_telling]).view(np.uint64).reshape(-1))
    return np.unique(np.concatenate(found))


def runs_of(numbers: npt.NDArray[np.int64], length: int = 4) -> list[bytes]:
    """Return what gives numbers away, which are too small to be found alone: some in a row, in both usual forms."""
    runs = numbers[: len(numbers) // length * length].reshape(-1, length)
    return [run.astype(kind).tobytes() for run in runs for kind in (np.int64, np.int32)]


class Haystack:
    """Streams, prepared for many searches."""

    def __init__(self, streams: Iterable[bytes]) -> None:
        views = []
        for stream in streams:
            for shift in range(_WINDOW):
                usable = (len(stream) - shift) // _WINDOW * _WINDOW
                if usable > 0:
                    views.append(np.frombuffer(stream, np.uint64, usable // _WINDOW, shift))
        self._seen = np.unique(np.concatenate(views)) if views else np.empty(0, np.uint64)

    def count(self, windows: npt.NDArray[np.uint64]) -> int:
        """Return how many of the windows were seen anywhere."""
        return int(np.isin(windows, self._seen, assume_unique=True).sum())


def texts(stream: bytes, shortest: int = 4) -> list[str]:
    """Return what can be read in a stream: runs of printable characters."""
    return [found.decode() for found in re.findall(rb"[\x20-\x7e]{%d,}" % shortest, stream)]


def is_tls(stream: bytes) -> bool:
    """Return whether a stream is records of TLS, from its first byte to its last or to a payload that is sealed."""
    at, records = 0, 0
    while at + 5 <= len(stream):
        kind, major, _, size = struct.unpack_from("!BBBH", stream, at)
        if kind not in (20, 21, 22, 23) or major != 3 or size > (1 << 14) + 256:
            # Both ends have proved who they are, and a header came, before a payload may be sealed.
            return records >= 3 and _is_noise(stream[at:])
        # Only the handshake's first messages are not encrypted: they are small, and hold nothing of the job.
        if kind == 22 and size > 1024:
            return False
        records += kind == 23
        at += 5 + size  # the last may be cut
    return at > 0


def _is_noise(data: bytes) -> bool:
    """Whether data is at least as long as a sealed payload, and nothing in it repeats: no cipher leaves a pattern."""
    return len(data) > SEALED_BYTES and len(zlib.compress(data, 1)) > 0.999 * len(data)


@dataclass(frozen=True)
class Heard:
    """What an eavesdropper has, sorted by what can be done with it."""

    encrypted: list[bytes]
    readable: dict[int, list[bytes]]
    """By the listener's port: streams that are neither TLS nor SSH."""

    @property
    def all(self) -> list[bytes]:
        return [*self.encrypted, *(one for some in self.readable.values() for one in some)]


def sort(streams: Mapping[Flow, Sequence[bytes]], ssh_port: int = 22) -> Heard:
    """Sort streams; the port of a connection's listener is the one that more connections share."""
    uses: dict[End, int] = defaultdict(int)
    for flow in streams:
        uses[flow.source] += 1
        uses[flow.target] += 1
    encrypted, readable = [], defaultdict(list)
    for flow, ones in streams.items():
        for one in filter(None, ones):
            if ssh_port in (flow.source.port, flow.target.port) or is_tls(one):
                encrypted.append(one)
            else:
                listener = max((flow.target, flow.source), key=lambda end: uses[end])
                readable[listener.port].append(one)
    return Heard(encrypted, dict(readable))
