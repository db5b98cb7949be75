"""What a message looks like on the wire: a header of fixed size, then the payload. Pure.

The header carries its own CRC-32 always, the payload's where the sender was asked for it (``CHECKED``). Nothing in a
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
"""What may be sent as a payload: anything whose bytes lie in one piece."""

MAGIC = b"PW"
VERSION = 1
CHECKED = 1
"""Flag: ``Header.checksum`` holds the payload's CRC-32."""

_LAYOUT = struct.Struct("<2sBBHHIIQQI")
_FRAME = struct.Struct(_LAYOUT.format + "I")
"""The layout, and the CRC-32 of its bytes behind it."""
SIZE = _FRAME.size
"""Bytes of a packed header."""


class Kind(IntEnum):
    """What a message means to its receiver."""

    HELLO = 1
    BYE = 2
    PUSH = 3
    """A worker's contribution to a chunk."""
    RESULT = 4
    """A chunk's finished sum."""
    BARRIER = 5
    GET = 6
    """A request for rows of a table."""
    ROW = 7
    """Rows of a table, asked for or pushed early."""
    INC = 8
    """Changes to rows of a table."""
    CLOCK = 9
    """A worker has finished a clock."""
    LOST = 10
    """A worker is gone; the others go on without it."""
    STATE = 11
    """A server's whole state, to be saved or restored."""
    ERROR = 12
    """The request could not be fulfilled; the payload says why, as UTF-8."""
    COMPACT_PUSH = 13
    """PUSH, compacted as ``sums/compact.py`` says."""
    COMPACT_RESULT = 14
    """RESULT, compacted."""


class Header(NamedTuple):
    """What a message says about itself; the fields after ``sender`` mean what its kind says they mean.

    A tuple, because every message makes two: a frozen dataclass takes five times as long to make.
    """

    kind: Kind
    sender: int
    unit: int
    chunk: int
    clock: int
    length: int
    """Bytes of the payload."""
    flags: int = 0
    checksum: int = 0
    """CRC-32 of the payload when ``flags`` holds ``CHECKED``."""


_KINDS = {int(kind): kind for kind in Kind}


def pack(header: Header) -> bytes:
    """Return the header as it travels; a field that does not fit raises ``WireError``."""
    try:
        body = _LAYOUT.pack(
            MAGIC,
            VERSION,
            header.kind,
            header.flags,
            header.sender,
            header.unit,
            header.chunk,
            header.clock,
            header.length,
            header.checksum,
        )
    except struct.error as error:
        raise WireError(f"{header} does not fit a frame: {error}") from None
    return body + zlib.crc32(body).to_bytes(4, "little")


def unpack(data: bytes | memoryview, payload_length: int | None = None) -> Header:
    """Return the header in ``data``, or raise ``FrameError``.

    ``payload_length`` is what came with it; None where the payload is read after the header, as long as it says.
    """
    if len(data) != SIZE:
        raise FrameError("header size", f"a header of {len(data)} bytes came in; headers have {SIZE}")
    magic, version, kind, flags, sender, unit, chunk, clock, length, checksum, seen = _FRAME.unpack(data)
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
    return Header(_KINDS[kind], sender, unit, chunk, clock, length, flags, checksum)


def check_payload(header: Header, payload: bytes | memoryview) -> None:
    """Raise ``FrameError`` when the header carries the payload's checksum and it is another one."""
    if header.flags & CHECKED and (seen := zlib.crc32(payload)) != header.checksum:
        raise FrameError(
            "payload checksum",
            f"{header.kind.name} payload of rank {header.sender} (unit {header.unit}, chunk {header.chunk}) "
            f"has checksum {seen:#x}, not {header.checksum:#x}",
        )
