"""Load and save learned parameters as ``.caffemodel`` and HDF5."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from poseidon import files
from poseidon.caffe.blob import Blob, proto_has_diff, proto_shape, stored_values
from poseidon.caffe.io import hdf5_files
from poseidon.caffe.layers.base import Layer
from poseidon.caffe.memory import Array
from poseidon.caffe.net import BuiltNet
from poseidon.caffe.schema import LayerParameter, NetParameter
from poseidon.caffe.schema.files import write_binary
from poseidon.caffe.upgrade import read_weights
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

SourceLayer = TypeVar("SourceLayer", Layer, LayerParameter)

Loads = list[tuple[Array, Array]]
"""Where to copy, and the values in memory order."""

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"


def load(net: BuiltNet, path: str | os.PathLike[str]) -> None:
    """Copy the parameters of layers with the same name from a file of either format."""
    if is_hdf5(path):
        load_hdf5(net, path)
    else:
        copy_from_proto(net, read_weights(path), str(path))


def is_hdf5(path: str | os.PathLike[str]) -> bool:
    """Whether a file is HDF5, by its first bytes."""
    return files.read_start(path, "weights", len(_HDF5_MAGIC)) == _HDF5_MAGIC


def copy_from_proto(net: BuiltNet, source: NetParameter, origin: str = "<weights>") -> None:
    """Copy parameters from a NetParameter to the layers of the same name; the others are skipped."""
    if not source.layer:
        raise ConfigError(f"{origin}: holds no layers, expected the parameters of a net; is it a .caffemodel?")
    loads: Loads = []
    for layer, stored in _matches(net, source.layer, origin):
        for number, (blob, proto) in enumerate(zip(layer.blobs, stored.blobs, strict=True)):
            if not blob.fits(proto):
                raise _shape_mismatch(layer, number, blob, proto_shape(proto), origin)
            try:
                loads.append((blob.data, stored_values(proto, "data")))
                if proto_has_diff(proto):
                    loads.append((blob.diff, stored_values(proto, "diff")))
            except ConfigError as error:
                raise layer.error(f"cannot copy parameter {number} from {origin}: {error}") from None
    _copy(net, loads, origin)


def to_proto(net: BuiltNet, write_diff: bool = False) -> NetParameter:
    """Return the net's layers with their parameters."""
    result = NetParameter(name=net.name)
    result.layer.extend([layer.to_proto(write_diff) for layer in net.layers])
    return result


def save(net: BuiltNet, path: str | os.PathLike[str], write_diff: bool = False) -> None:
    """Write a ``.caffemodel``; the previous file stays intact until the new one is complete."""
    write_binary(path, to_proto(net, write_diff))


def load_hdf5(net: BuiltNet, path: str | os.PathLike[str]) -> None:
    """Copy parameters from an HDF5 file, which may lack those that a layer shares from another."""
    loads: Loads = []
    with hdf5_files.reading(path, "HDF5 weights") as file:
        if "data" not in file:
            raise ConfigError(f"{path}: has no group 'data'; Caffe did not write these weights")
        data = hdf5_files.group_of(file, "data", str(path))
        for name in data:
            loads += _loads_of_group(net, name, hdf5_files.group_of(data, name, str(path)), str(path))
    _copy(net, loads, str(path))


def save_hdf5(net: BuiltNet, path: str | os.PathLike[str], write_diff: bool = False) -> None:
    """Write parameters (each by its owner only) to an HDF5 file, whole or not at all."""
    with hdf5_files.writing(path, "HDF5 weights") as file:
        data = file.create_group("data")
        diff = file.create_group("diff") if write_diff else None
        for index, layer in enumerate(net.layers):
            group = data.create_group(layer.name)
            diff_group = None if diff is None else diff.create_group(layer.name)
            for number, blob in enumerate(layer.blobs):
                if net.param_table.is_owner(index, number):
                    group.create_dataset(str(number), data=blob.data)
                if diff_group is not None:
                    diff_group.create_dataset(str(number), data=blob.diff)


def share(net: BuiltNet, other: BuiltNet) -> None:
    """Make ``net`` share the parameter values of layers of the same name in ``other`` from now on."""
    for layer, source in _matches(net, other.layers, "the other net"):
        for number, (blob, owner) in enumerate(zip(layer.blobs, source.blobs, strict=True)):
            if blob.shape != owner.shape:
                raise _shape_mismatch(layer, number, blob, owner.shape, "the other net")
            blob.share_data(owner)


def _matches(net: BuiltNet, sources: Iterable[SourceLayer], origin: str) -> Iterator[tuple[Layer, SourceLayer]]:
    """Yield the net's layers with the sources of the same name, which must have as many parameters."""
    for source in sources:
        layer = _target(net, source.name)
        if layer is None:
            continue
        if len(source.blobs) != len(layer.blobs):
            raise layer.error(f"has {len(layer.blobs)} parameters, {origin} holds {len(source.blobs)} for it")
        yield layer, source


def _copy(net: BuiltNet, loads: Loads, origin: str) -> None:
    """Copy values that have all been found to fit, so that an error never leaves a net half loaded."""
    if not loads and any(layer.blobs for layer in net.layers):
        log.warning("%s holds no parameters for any layer of this net: nothing was loaded", origin)
    for target, values in loads:
        target.flat[...] = values


def _loads_of_group(net: BuiltNet, name: str, group: Any, origin: str) -> Loads:
    layer = _target(net, name)
    if layer is None:
        return []
    loads: Loads = []
    index = net.layers.index(layer)
    if len(group) > len(layer.blobs):
        raise layer.error(f"has {len(layer.blobs)} parameters, {origin} holds {len(group)} for it")
    for number, blob in _missing_allowed(net, index, layer, group, origin):
        stored = hdf5_files.numbers_of(group, str(number), origin)
        if tuple(stored.shape) != blob.shape:
            raise _shape_mismatch(layer, number, blob, tuple(stored.shape), origin)
        loads.append((blob.data, hdf5_files.values_of(stored).reshape(-1)))
    return loads


def _missing_allowed(net: BuiltNet, index: int, layer: Layer, group: Any, origin: str) -> Iterator[tuple[int, Blob]]:
    """Yield the parameters that the file holds; only shared ones may be absent."""
    for number, blob in enumerate(layer.blobs):
        if str(number) in group:
            yield number, blob
        elif net.param_table.is_owner(index, number):
            raise layer.error(f"parameter {number} is missing in {origin}")


def _target(net: BuiltNet, name: str) -> Layer | None:
    for layer in net.layers:
        if layer.name == name:
            return layer
    log.info("Ignoring source layer %s", name)
    return None


def _shape_mismatch(layer: Layer, number: int, blob: Blob, stored: tuple[int, ...], origin: str) -> ConfigError:
    return layer.error(
        f"cannot copy parameter {number}: its shape in {origin} is {stored}, in this net {blob.shape}; "
        "to learn it from scratch instead, rename the layer"
    )
