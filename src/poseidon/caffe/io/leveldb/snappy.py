"""Snappy decompression (LevelDB compresses the blocks of its tables with it)."""

from __future__ import annotations

from poseidon.caffe.schema.varint import read_varint


def decompress(content: bytes) -> bytes:
    """Return the uncompressed content; ValueError if it is damaged."""
    try:
        return _decompress(content)
    except IndexError:
        raise ValueError("compressed content ends in the middle of an element") from None


def _decompress(content: bytes) -> bytes:
    size, position = read_varint(content, 0)
    out = bytearray()
    end = len(content)
    while position < end:
        tag = content[position]
        position += 1
        kind = tag & 3
        if kind == 0:
            length = tag >> 2
            if length >= 60:
                extra = length - 59
                length = int.from_bytes(content[position : position + extra], "little")
                position += extra
            length += 1
            if position + length > end:
                raise ValueError("a literal extends beyond the end of the compressed content")
            out += content[position : position + length]
            position += length
            continue
        if kind == 1:
            length = (tag >> 2 & 7) + 4
            offset = (tag & 0xE0) << 3 | content[position]
            position += 1
        else:
            length = (tag >> 2) + 1
            width = 2 if kind == 2 else 4
            if position + width > end:
                raise ValueError("compressed content ends in the middle of an element")
            offset = int.from_bytes(content[position : position + width], "little")
            position += width
        start = len(out) - offset
        if not offset or start < 0:
            raise ValueError(f"a copy goes back {offset} bytes, but only {len(out)} have been produced")
        if length <= offset:
            out += out[start : start + length]
        else:  # the copy overlaps itself: a pattern of `offset` bytes is repeated
            pattern = out[start:]
            out += (pattern * (length // offset + 1))[:length]
    if len(out) != size:
        raise ValueError(f"{len(out)} bytes came out of compressed content that states {size}")
    return bytes(out)
