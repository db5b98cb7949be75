"""Numbers in groups of seven bits, as protocol buffers and LevelDB store them."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """Return the stored form of a number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(content: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the number at ``position`` and the position after it; IndexError at the end of the content."""
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
