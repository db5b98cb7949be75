"""Move long arrays between numpy and packed fields without visiting each number.

protobuf's Python containers hand numbers over one by one (seconds for a large model). The wire form of a packed
field is simply its raw little-endian values behind a tag and a length, so both directions can work on bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.schema import Message
from poseidon.caffe.schema.varint import read_varint, varint

_LENGTH_DELIMITED = 2


def append_floats(proto: Message, field: str, values: NDArray[np.floating[Any]]) -> None:
    """Append all values, in memory order, to a packed float or double field."""
    number, dtype = _layout(proto, field)
    content = np.ascontiguousarray(values, dtype=dtype)
    header = varint(number << 3 | _LENGTH_DELIMITED) + varint(content.nbytes)
    proto.MergeFromString(header + content.tobytes())


def read_floats(proto: Message, field: str) -> NDArray[np.floating[Any]]:
    """Return a packed float or double field as a (read-only) numpy array."""
    number, dtype = _layout(proto, field)
    if not len(getattr(proto, field)):
        return np.empty(0, dtype)
    content = memoryview(proto.SerializeToString())
    position = 0
    while position < len(content):
        tag, position = read_varint(content, position)
        if tag & 7 != _LENGTH_DELIMITED:
            position = _skip(content, position, tag & 7)
            continue
        length, position = read_varint(content, position)
        if tag >> 3 == number:
            return np.frombuffer(content[position : position + length], dtype)
        position += length
    raise AssertionError(f"{field} holds values but is not on the wire")


def _layout(proto: Message, field: str) -> tuple[int, np.dtype[Any]]:
    descriptor = proto.DESCRIPTOR.fields_by_name[field]
    return descriptor.number, np.dtype("<f8" if descriptor.type == descriptor.TYPE_DOUBLE else "<f4")


def _skip(content: memoryview, position: int, wire_type: int) -> int:
    if wire_type == 0:
        return read_varint(content, position)[1]
    return position + (8 if wire_type == 1 else 4)
