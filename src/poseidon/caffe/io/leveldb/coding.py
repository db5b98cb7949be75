"""LevelDB's encoding of numbers, strings and internal keys."""

from __future__ import annotations

from typing import NamedTuple

from poseidon.caffe.schema.varint import read_varint, varint

VALUE = 1
DELETION = 0


class InternalKey(NamedTuple):
    """A key as stored in tables: among entries with the same user key, the highest sequence number wins."""

    user: bytes
    sequence: int
    kind: int
    """VALUE or DELETION."""

    @classmethod
    def unpack(cls, content: bytes) -> InternalKey:
        """Read a stored key: the user's key, then eight bytes of sequence number and kind."""
        if len(content) < 8:
            raise ValueError(f"an internal key has at least 8 bytes, this one has {len(content)}")
        trailer = int.from_bytes(content[-8:], "little")
        return cls(content[:-8], trailer >> 8, trailer & 0xFF)

    def pack(self) -> bytes:
        """Return the stored form."""
        return self.user + (self.sequence << 8 | self.kind).to_bytes(8, "little")


def string(content: bytes) -> bytes:
    """Return bytes prefixed with their length."""
    return varint(len(content)) + content


def read_string(content: bytes, position: int) -> tuple[bytes, int]:
    """Return the bytes at ``position`` and the position after them."""
    length, position = read_varint(content, position)
    if position + length > len(content):
        raise IndexError("a string extends beyond the end of its record")
    return content[position : position + length], position + length
