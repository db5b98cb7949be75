"""Arrays to messages and back: BlobProto, BlobProtoVector, Datum (offered to scripts as ``caffe.io``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.blob import proto_shape
from poseidon.caffe.schema import BlobProto, Datum
from poseidon.caffe.schema.files import parse_binary
from poseidon.caffe.schema.messages import BlobProtoVector
from poseidon.caffe.schema.packed import append_floats, read_floats
from poseidon.errors import ConfigError


def blobproto_to_array(blob: BlobProto, return_diff: bool = False) -> NDArray[np.float64]:
    """Return a BlobProto's values (or gradients) in the shape it states, in double precision as pycaffe does."""
    field = "diff" if return_diff else "data"
    values = read_floats(blob, field)
    if not values.size:
        values = read_floats(blob, f"double_{field}")
    shape = proto_shape(blob)
    if values.size != int(np.prod(shape)):
        raise ConfigError(f"BlobProto of shape {shape} holds {values.size} values as {field}")
    return values.astype(np.float64).reshape(shape)


def array_to_blobproto(arr: NDArray[Any], diff: NDArray[Any] | None = None) -> BlobProto:
    """Return a BlobProto of an array of any number of axes, with gradients if given."""
    blob = BlobProto()
    blob.shape.dim.extend(arr.shape)
    blob.shape.SetInParent()
    append_floats(blob, "data", np.asarray(arr))
    if diff is not None:
        append_floats(blob, "diff", np.asarray(diff))
    return blob


def arraylist_to_blobprotovector_str(arraylist: Iterable[NDArray[Any]]) -> bytes:
    """Return arrays as a serialised BlobProtoVector."""
    vector = BlobProtoVector()
    vector.blobs.extend([array_to_blobproto(arr) for arr in arraylist])
    return bytes(vector.SerializeToString())


arraylist_to_blobprotovecor_str = arraylist_to_blobprotovector_str
"""pycaffe's own spelling."""


def blobprotovector_str_to_arraylist(content: bytes) -> list[NDArray[np.float64]]:
    """Return the arrays of a serialised BlobProtoVector."""
    return [blobproto_to_array(blob) for blob in parse_binary(content, BlobProtoVector).blobs]


def array_to_datum(arr: NDArray[Any], label: int | None = None) -> Datum:
    """Return a Datum of an array (channels, height, width): 8-bit values as bytes, others as floats."""
    if arr.ndim != 3:
        raise ConfigError(f"a Datum holds an array (channels, height, width); given one of shape {arr.shape}")
    datum = Datum()
    datum.channels, datum.height, datum.width = arr.shape
    if arr.dtype == np.uint8:
        datum.data = arr.tobytes()
    else:
        datum.float_data.extend(arr.astype(float).ravel().tolist())
    if label is not None:
        datum.label = int(label)
    return datum


def datum_to_array(datum: Datum) -> NDArray[Any]:
    """Return a Datum's values as (channels, height, width); an encoded image has to be decoded first."""
    if datum.encoded:
        raise ConfigError("datum_to_array: this Datum holds an encoded image file in `data`; decode it first")
    shape = (datum.channels, datum.height, datum.width)
    if len(datum.data):
        values: NDArray[Any] = np.frombuffer(datum.data, dtype=np.uint8)
    else:
        values = np.array(datum.float_data, dtype=float)
    if values.size != int(np.prod(shape)):
        raise ConfigError(f"Datum of shape {shape} holds {values.size} values")
    result: NDArray[Any] = values.reshape(shape).copy()
    return result
