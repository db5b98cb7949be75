"""Blobs: the arrays that flow between layers and the parameters they learn, as values (data) and gradients (diff)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from poseidon.caffe.memory import Array, Memory
from poseidon.caffe.schema import BlobProto
from poseidon.caffe.schema.packed import append_floats, read_floats
from poseidon.errors import ConfigError
from poseidon.files import memory_bytes

Shape = tuple[int, ...]

MOST_VALUES = 2**31 - 1
"""Caffe's limit for a blob."""
_VALUE_BYTES = 4


class Blob:
    """A shaped array of values and one of gradients.

    Scripts use ``data`` and ``diff`` (live numpy views); layers use the tensors and ``put_data``/``put_diff``, which
    replace the content without copying.
    """

    __slots__ = ("_data", "_diff", "_shape")

    def __init__(self, shape: Sequence[int] = (0,)) -> None:
        self._shape: Shape = _checked(shape)
        self._data = Memory(self._shape)
        self._diff = Memory(self._shape)

    # The interface of pycaffe.

    @property
    def data(self) -> Array:
        """A live numpy view of the values: writing to it is seen by the next forward pass."""
        return self._data.array().reshape(self._shape)

    @property
    def diff(self) -> Array:
        """A live numpy view of the gradients."""
        return self._diff.array().reshape(self._shape)

    @property
    def shape(self) -> Shape:
        """The dimensions; empty for a single value."""
        return self._shape

    @property
    def count(self) -> int:
        """The number of values."""
        return math.prod(self._shape)

    @property
    def num(self) -> int:
        """The first of four axes (older interface)."""
        return self._legacy(0)

    @property
    def channels(self) -> int:
        """The second of four axes (older interface)."""
        return self._legacy(1)

    @property
    def height(self) -> int:
        """The third of four axes (older interface)."""
        return self._legacy(2)

    @property
    def width(self) -> int:
        """The fourth of four axes (older interface)."""
        return self._legacy(3)

    def reshape(self, *shape: int) -> None:
        """Change the dimensions; the values are kept if their number stays the same and become zero otherwise."""
        new = _checked(shape)
        if new == self._shape:
            return
        if math.prod(new) != math.prod(self._shape):
            self._data, self._diff = Memory(new), Memory(new)
        self._shape = new

    # The interface of layers and solvers.

    @property
    def data_tensor(self) -> torch.Tensor:
        """The values on the active device."""
        tensor = self._data.tensor()
        return tensor if tensor.shape == self._shape else tensor.reshape(self._shape)

    @property
    def diff_tensor(self) -> torch.Tensor:
        """The gradients on the active device (zeros where nothing has been written)."""
        tensor = self._diff.tensor()
        return tensor if tensor.shape == self._shape else tensor.reshape(self._shape)

    @property
    def has_diff(self) -> bool:
        """Whether gradients have been written since they were last cleared."""
        return not self._diff.is_zero

    @property
    def memories(self) -> tuple[Memory, Memory]:
        """What holds the values, and the gradients."""
        return self._data, self._diff

    @property
    def is_viewed(self) -> bool:
        """Whether anyone holds a numpy view of the values."""
        return self._data.is_viewed

    def put_data(self, values: torch.Tensor, borrowed: bool = False) -> None:
        """Make ``values`` the content and adopt their shape; see ``Memory.put`` for ``borrowed``."""
        shape = tuple(values.shape)
        if shape != self._shape:
            self.reshape(*shape)
        self._data.put(values, borrowed)

    def put_diff(self, gradients: torch.Tensor, borrowed: bool = False) -> None:
        """Make ``gradients``, which must have the blob's shape, the content of diff."""
        assert gradients.shape == self._shape, f"diff of shape {tuple(gradients.shape)} for blob {self._shape}"
        self._diff.put(gradients, borrowed)

    def add_diff(self, gradients: torch.Tensor) -> None:
        """Add to diff, as parameters do; the first addition after clearing adopts the tensor."""
        if self._diff.is_zero:
            self._diff.put(gradients.reshape(self._shape).contiguous())
        else:
            self.diff_tensor.add_(gradients.reshape(self._shape))

    def clear_diff(self) -> None:
        """Set the gradients to zero."""
        self._diff.clear()

    def share_data(self, owner: Blob) -> None:
        """Use the owner's values from now on; both blobs see each other's writes."""
        self._check_count(owner)
        self._data = owner._data

    def share_diff(self, owner: Blob) -> None:
        """Use the owner's gradients from now on."""
        self._check_count(owner)
        self._diff = owner._diff

    # Files.

    def to_proto(self, write_diff: bool = False) -> BlobProto:
        """Return the values (and gradients) as a BlobProto."""
        proto = BlobProto()
        proto.shape.dim.extend(self._shape)
        proto.shape.SetInParent()
        append_floats(proto, "data", self.data)
        if write_diff:
            append_floats(proto, "diff", self.diff)
        return proto

    def from_proto(self, proto: BlobProto, reshape: bool = True) -> None:
        """Copy values and, with ``reshape``, the shape from a BlobProto in single or double precision."""
        if not reshape and not self.fits(proto):
            raise ConfigError(f"stored blob has shape {proto_shape(proto)}, this one {self._shape}")
        # The values first: nothing is allocated for a shape that the file does not fill.
        data = stored_values(proto, "data")
        diff = stored_values(proto, "diff") if proto_has_diff(proto) else None
        if reshape:
            self.reshape(*proto_shape(proto))
        self.data.flat[...] = data
        if diff is not None:
            self.diff.flat[...] = diff

    def fits(self, proto: BlobProto) -> bool:
        """Whether a stored blob has this shape; older files pad shapes to four axes with leading ones."""
        stored = proto_shape(proto)
        if _has_legacy_shape(proto):
            return len(self._shape) <= 4 and (1,) * (4 - len(self._shape)) + self._shape == stored
        return stored == self._shape

    def _legacy(self, axis: int) -> int:
        if len(self._shape) > 4:
            raise ConfigError(f"num, channels, height and width need at most 4 axes; this blob has {self._shape}")
        return self._shape[axis] if axis < len(self._shape) else 1

    def _check_count(self, owner: Blob) -> None:
        if self.count != owner.count:
            raise ConfigError(f"cannot share: owner has shape {owner.shape}, sharing blob {self._shape}")


class BlobVec(list[Blob]):
    """The parameters of a layer; Python layers add theirs with ``add_blob``."""

    def add_blob(self, *shape: int) -> None:
        """Append a new blob of the given dimensions, filled with zeros."""
        self.append(Blob(shape))


def proto_shape(proto: BlobProto) -> Shape:
    """Return the dimensions of a BlobProto, written in the current or in the older four-axis form."""
    if _has_legacy_shape(proto):
        return (proto.num, proto.channels, proto.height, proto.width)
    return tuple(proto.shape.dim)


def proto_has_diff(proto: BlobProto) -> bool:
    """Whether a BlobProto holds gradients."""
    return bool(len(proto.diff) or len(proto.double_diff))


def _has_legacy_shape(proto: BlobProto) -> bool:
    return any(proto.HasField(name) for name in ("num", "channels", "height", "width"))


def stored_values(proto: BlobProto, field: str) -> Array:
    """Return the data or diff of a BlobProto, in memory order; their number must be what its shape says."""
    count = math.prod(_checked(proto_shape(proto)))
    values = read_floats(proto, f"double_{field}")
    if not values.size:
        values = read_floats(proto, field)
    if values.size != count:
        raise ConfigError(f"stored blob of shape {proto_shape(proto)} needs {count} values but holds {values.size}")
    return values.astype(np.float32, copy=False)


def _checked(shape: Sequence[int]) -> Shape:
    result = tuple(int(size) for size in shape)
    if any(size < 0 for size in result) or len(result) > 32:
        raise ConfigError(f"a blob cannot have shape {result}: it has at most 32 dimensions, all of them >= 0")
    values = math.prod(result)
    if values > MOST_VALUES:
        raise ConfigError(f"a blob cannot have shape {result}: that is {values} values, expected at most {MOST_VALUES}")
    if values * _VALUE_BYTES > memory_bytes():
        raise ConfigError(
            f"a blob of shape {result} needs {values * _VALUE_BYTES / 1e9:.1f} GB; this machine has "
            f"{memory_bytes() / 1e9:.1f} GB of memory"
        )
    return result
