"""What a message looks like on the wire: a header of fixed size, then the payload. Pure.

The header always carries its own CRC-32, and the payload's if the sender was asked for it (``CHECKED``). Nothing in a
message is ever unpickled.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from poseidon.errors import FrameError, WireError

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.generic]
"""What can be sent as a payload: anything contiguous in memory."""

MAGIC = b"PW"
VERSION = 4
CHECKED = 1
"""Flag: ``Header.checksum`` holds the payload's CRC-32."""

_LAYOUT = struct.Struct("<2sBBBBHIQQQI")
_FRAME = struct.Struct(_LAYOUT.format + "I")
"""The layout, followed by the CRC-32 of its bytes."""
SIZE = _FRAME.size
"""Bytes of a packed header."""


class Kind(IntEnum):
    """What a message means to its receiver."""

    HELLO = 1
    BYE = 2
    """A rank ends in good order; or it gives up, and ``subject`` is the rank because of which."""
    PART = 3
    """A worker's part of a chunk, for the chunk's owner."""
    SUM = 4
    """The sum of a chunk, from its owner to every worker."""
    GET = 6
    """A request for rows of a table."""
    ROW = 7
    """Rows of a table, requested or pushed early."""
    INC = 8
    """Changes to rows of a table."""
    CLOCK = 9
    """A worker has finished a clock."""
    LOST = 10
    """A worker is gone; the others go on without it."""
    STATE = 11
    """A server's whole state, to be saved or restored."""
    ERROR = 12
    """The request failed; the payload says why, as UTF-8."""
    FETCH = 13
    """A request for what the owner of a chunk keeps of it; the detail says what."""
    FETCHED = 14
    """The answer to ``FETCH``."""
    LEAVE = 15
    """A worker will fetch nothing more."""
    TOUCHED = 16
    """The touched rows of a worker's part of a chunk, for the chunk's owner: ``PART`` has the rest."""
    PARCELS = 17
    """A worker's rows and factors, for every worker."""
    MAIL = 18
    """A piece of a tagged message: whatever else goes from worker to worker (``team/mail.py``)."""


class Header(NamedTuple):
    """What a message says about itself.

    ``PART`` and ``SUM`` are about a chunk of a slot, the kinds of the tables about a table; each field says what it
    means to either. A tuple, because every message makes two: a frozen dataclass takes five times as long to make.
    """

    kind: Kind
    sender: int
    subject: int
    """What the message is about: a slot, or a table."""
    number: int
    """Which chunk of the slot; for tables, the message's number between its two ranks."""
    clock: int
    """The step the values belong to; for tables, the sender's clock."""
    length: int
    """Bytes of the payload."""
    detail: int = 0
    """How the chunk is encoded; for tables, flags of their own."""
    flags: int = 0
    """The wire's own flags."""
    checksum: int = 0
    """CRC-32 of the payload if ``flags`` contains ``CHECKED``."""

    @property
    def name(self) -> str:
        """For errors: which message it is."""
        return (
            f"{self.kind.name} of rank {self.sender} (subject {self.subject}, number {self.number}, step {self.clock})"
        )


_KINDS = {int(kind): kind for kind in Kind}


def pack(header: Header) -> bytes:
    """Return the header as it travels; raise ``WireError`` for a field that does not fit."""
    try:
        body = _LAYOUT.pack(
            MAGIC,
            VERSION,
            header.kind,
            header.flags,
            header.detail,
            header.sender,
            header.subject,
            header.number,
            header.clock,
            header.length,
            header.checksum,
        )
    except struct.error as error:
        raise WireError(f"{header} does not fit a frame: {error}") from None
    return body + zlib.crc32(body).to_bytes(4, "little")


def unpack(data: bytes | memoryview, payload_length: int | None = None) -> Header:
    """Return the header in ``data``, or raise ``FrameError``.

    ``payload_length`` is the size of what came with it; None where the payload is read after the header.
    """
    if len(data) != SIZE:
        raise FrameError("header size", f"a header of {len(data)} bytes came in; headers have {SIZE}")
    magic, version, kind, flags, detail, sender, subject, number, clock, length, checksum, seen = _FRAME.unpack(data)
    if magic != MAGIC:
        raise FrameError("magic", f"a header begins with {magic!r}, not {MAGIC!r}; the sender is not Poseidon")
    if version != VERSION:
        raise FrameError(
            "version", f"a header has version {version}, not {VERSION}; install one version of Poseidon on all machines"
        )
    expected = zlib.crc32(data[: _LAYOUT.size])
    if seen != expected:
        raise FrameError("header checksum", f"a header's checksum is {seen:#x}, but its bytes give {expected:#x}")
    if kind not in _KINDS:
        raise FrameError("kind", f"rank {sender} sent a message of unknown kind {kind}")
    if payload_length is not None and length != payload_length:
        raise FrameError(
            "length",
            f"rank {sender} announced {length} bytes of {_KINDS[kind].name} payload, {payload_length} came",
        )
    return Header(_KINDS[kind], sender, subject, number, clock, length, detail, flags, checksum)


def check_payload(header: Header, payload: bytes | memoryview) -> None:
    """Raise ``FrameError`` if the header carries a checksum that is not the payload's."""
    if header.flags & CHECKED and (seen := zlib.crc32(payload)) != header.checksum:
        raise FrameError(
            "payload checksum",
            f"{header.name} was damaged on its way: its payload has checksum {seen:#x}, not {header.checksum:#x}",
        )
