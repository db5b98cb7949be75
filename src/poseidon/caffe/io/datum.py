"""Datum: one record of a database, an image or a vector with a label."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from poseidon.caffe.io.images import Image, Mode, decode_image
from poseidon.caffe.schema import Datum
from poseidon.caffe.schema.varint import read_varint
from poseidon.errors import ConfigError

_DATA, _FLOATS = 4, 6
_VARINT, _BYTES = 0, 2

Values = NDArray[Any]
"""Channels, height, width; 8-bit or single precision."""


def parse_datum(content: bytes | memoryview, origin: str) -> Datum:
    """Parse a record; ``origin`` names database and key in the error."""
    datum = Datum()
    try:
        datum.ParseFromString(content)  # type: ignore[arg-type]  # protobuf takes any buffer
    except DecodeError:
        raise ConfigError(
            f"{origin}: {len(content)} bytes are not a complete Datum; the database is damaged or holds other records"
        ) from None
    return datum


class RawDatum(NamedTuple):
    """A record with its bytes where they are: protobuf would copy them twice."""

    channels: int
    height: int
    width: int
    data: memoryview
    label: int
    encoded: bool
    float_data: tuple[float, ...] = ()


def read_datum(content: bytes | memoryview, origin: str) -> Datum | RawDatum:
    """Return a record, not copied if it is one of bytes in the plain form that everybody writes."""
    view = memoryview(content)
    return _plain(view) or parse_datum(view, origin)


def _plain(view: memoryview) -> RawDatum | None:
    """Return a record whose fields are there at most once and in order, or None: protobuf decides about all others."""
    numbers = [0] * 8
    data, last, position, end = view[:0], 0, 0, len(view)
    try:
        while position < end:
            field, kind = view[position] >> 3, view[position] & 7
            if not last < field < 8 or field == _FLOATS or kind != (_BYTES if field == _DATA else _VARINT):
                return None
            value, position = read_varint(view, position + 1)
            if field == _DATA:
                data, position = view[position : position + value], position + value
                if position > end:
                    return None
            elif value >= 1 << 31:  # negative, or more than the field holds
                return None
            else:
                numbers[field] = value
            last = field
    except (ValueError, IndexError):
        return None
    return RawDatum(numbers[1], numbers[2], numbers[3], data, numbers[5], bool(numbers[7])) if data else None


def datum_values(datum: Datum | RawDatum, mode: Mode, origin: str) -> Values:
    """Return the values of a record as (channels, height, width), decoding it if it is an image file.

    ``mode`` concerns encoded records only.
    """
    if datum.encoded:
        return image_to_values(decode_image(datum.data, mode, origin))
    shape = (datum.channels, datum.height, datum.width)
    values: Values
    if datum.data:
        values = np.frombuffer(datum.data, np.uint8)
    else:
        values = np.fromiter(datum.float_data, np.float32, len(datum.float_data))
    if values.size != math.prod(shape) or not datum.channels > 0:
        raise ConfigError(
            f"{origin}: the Datum states channels, height and width {shape}, which is {math.prod(shape)} values, "
            f"but holds {values.size}"
        )
    shaped: Values = values.reshape(shape)
    return shaped


def image_to_values(pixels: Image) -> Values:
    """Return an image with its channels first."""
    values: Values = pixels.transpose(2, 0, 1)
    return values


def image_datum(pixels: Image, label: int) -> Datum:
    """Return a raw record of an image."""
    height, width, channels = pixels.shape
    # Caffe writes the flag even when it is false.
    return Datum(
        channels=channels,
        height=height,
        width=width,
        data=image_to_values(pixels).tobytes(),
        label=label,
        encoded=False,
    )


def encoded_datum(content: bytes, label: int) -> Datum:
    """Return a record that holds an image file as it is."""
    return Datum(data=content, label=label, encoded=True)
