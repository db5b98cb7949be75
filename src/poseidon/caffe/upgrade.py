"""Upgrade nets and solvers written for older Caffe versions to the current form.

The order matters and is Caffe's: V0 layers to V1, data transformations into ``transform_param``, V1 layers to current
ones, net-level inputs to an Input layer, then the batch-norm form.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from poseidon.caffe.schema import LayerParameter, NetParameter, SolverParameter
from poseidon.caffe.schema.files import read_binary, read_text
from poseidon.caffe.schema.messages import V1LayerParameter
from poseidon.caffe.upgrade_v0 import upgrade_v0_net
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

_TRANSFORM_FIELDS = ("scale", "mean_file", "crop_size", "mirror")
_TRANSFORMED = {"DATA": "data_param", "IMAGE_DATA": "image_data_param", "WINDOW_DATA": "window_data_param"}
_SOLVER_TYPES = {
    "SGD": "SGD",
    "NESTEROV": "Nesterov",
    "ADAGRAD": "AdaGrad",
    "RMSPROP": "RMSProp",
    "ADADELTA": "AdaDelta",
    "ADAM": "Adam",
}
# Types whose current name is not the old one in CamelCase.
_IRREGULAR_TYPES = {
    "NONE": "",
    "ABSVAL": "AbsVal",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "IM2COL": "Im2col",
    "LRN": "LRN",
    "MVN": "MVN",
    "RELU": "ReLU",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "TANH": "TanH",
}
# Fields of a V1 layer that have no counterpart of the same name and meaning.
_FOLDED = {"type", "layer", "param", "blob_share_mode", "blobs_lr", "weight_decay"}


def read_net(path: str | os.PathLike[str]) -> NetParameter:
    """Read a net from a prototxt of any version and return it in the current form."""
    net = read_text(path, NetParameter)
    upgrade_net(net, str(path))
    return net


def read_weights(path: str | os.PathLike[str]) -> NetParameter:
    """Read a ``.caffemodel`` of any version and return it in the current form."""
    net = read_binary(path, NetParameter)
    upgrade_net(net, str(path))
    return net


def read_solver(path: str | os.PathLike[str]) -> SolverParameter:
    """Read and upgrade a solver's prototxt; a missing snapshot prefix is filled in."""
    solver = read_text(path, SolverParameter)
    upgrade_solver(solver, str(path))
    if not solver.HasField("snapshot_prefix"):
        solver.snapshot_prefix = str(Path(path).with_suffix(""))
        log.info("snapshot_prefix was not specified and is set to %s", solver.snapshot_prefix)
    elif Path(solver.snapshot_prefix).is_dir():
        solver.snapshot_prefix = str(Path(solver.snapshot_prefix) / Path(path).stem)
        log.info("snapshot_prefix was a directory and is replaced to %s", solver.snapshot_prefix)
    return solver


def upgrade_net(net: NetParameter, origin: str = "<net>") -> bool:
    """Upgrade ``net`` in place; return whether anything changed."""
    before = net.SerializeToString(deterministic=True)
    if any(layer.HasField("layer") for layer in net.layers):
        log.info("Attempting to upgrade input file specified using deprecated V0LayerParameter: %s", origin)
        net.CopyFrom(upgrade_v0_net(net, origin))
    if any(_has_old_transform(old) for old in net.layers):
        for old in net.layers:
            _move_transform(old)
    if net.layers:
        _upgrade_v1_layers(net, origin)
    if net.input:
        _upgrade_inputs(net, origin)
    for layer in net.layer:
        _freeze_batch_norm(layer)
    return bool(net.SerializeToString(deterministic=True) != before)


def upgrade_solver(solver: SolverParameter, origin: str = "<solver>") -> bool:
    """Replace the old ``solver_type`` enum by the ``type`` string in place; return whether it was set."""
    if not solver.HasField("solver_type"):
        return False
    if solver.HasField("type"):
        raise ConfigError(f"{origin}: gives both 'type' and the older 'solver_type'; keep one of them")
    enum = solver.DESCRIPTOR.enum_types_by_name["SolverType"]
    solver.type = _SOLVER_TYPES[enum.values_by_number[solver.solver_type].name]
    solver.ClearField("solver_type")
    return True


def _v1_type_name(layer: V1LayerParameter) -> str:
    return str(V1LayerParameter.LayerType.Name(layer.type))


def _has_old_transform(layer: V1LayerParameter) -> bool:
    settings_name = _TRANSFORMED.get(_v1_type_name(layer))
    if settings_name is None:
        return False
    return any(getattr(layer, settings_name).HasField(name) for name in _TRANSFORM_FIELDS)


def _move_transform(layer: V1LayerParameter) -> None:
    """Move scale, mean_file, crop_size and mirror from a data layer's settings to ``transform_param``."""
    settings_name = _TRANSFORMED.get(_v1_type_name(layer))
    if settings_name is None:
        return
    settings = getattr(layer, settings_name)
    settings.SetInParent()
    layer.transform_param.SetInParent()
    for name in _TRANSFORM_FIELDS:
        if settings.HasField(name):
            setattr(layer.transform_param, name, getattr(settings, name))
            settings.ClearField(name)


def _upgrade_v1_layers(net: NetParameter, origin: str) -> None:
    if net.layer:
        raise ConfigError(
            f"{origin}: holds both 'layer' and the older 'layers' fields; "
            'rewrite the older ones as layer { type: "..." } and load it again'
        )
    for old in net.layers:
        net.layer.add().CopyFrom(upgrade_v1_layer(old))
    net.ClearField("layers")


def upgrade_v1_layer(old: V1LayerParameter) -> LayerParameter:
    """Return the current form of one V1 layer."""
    new = LayerParameter()
    if old.HasField("type"):
        written = _v1_type_name(old)
        new.type = _IRREGULAR_TYPES.get(written, written.title().replace("_", ""))
    for field, value in old.ListFields():
        if field.name in _FOLDED:
            continue
        if field.name == "name":
            new.name = value
        else:
            getattr(new, field.name).MergeFrom(value)
    _add_param_specs(new, old)
    return new


def _add_param_specs(new: LayerParameter, old: V1LayerParameter) -> None:
    """Fold the parallel lists of the old form into one ``param`` entry per parameter."""
    lists: dict[str, Sequence[object]] = {
        "name": old.param,
        "share_mode": old.blob_share_mode,
        "lr_mult": old.blobs_lr,
        "decay_mult": old.weight_decay,
    }
    for _ in range(max(len(values) for values in lists.values())):
        new.param.add()
    for field, values in lists.items():
        for spec, value in zip(new.param, values, strict=False):
            setattr(spec, field, value)


def _upgrade_inputs(net: NetParameter, origin: str) -> None:
    """Turn net-level inputs into a leading Input layer; inputs without a shape (old weights) are dropped."""
    if net.input_shape or net.input_dim:
        shapes = [list(shape.dim) for shape in net.input_shape]
        if not shapes:
            dims = list(net.input_dim)
            shapes = [dims[start : start + 4] for start in range(0, len(dims), 4)]
        if len(shapes) < len(net.input) or any(not shape for shape in shapes):
            raise ConfigError(
                f"{origin}: {len(net.input)} inputs ({', '.join(net.input)}) but shapes for {len(shapes)}; "
                "give one input_shape, or four input_dim, for each input"
            )
        layers = [_input_layer(list(net.input), shapes), *net.layer]
        net.ClearField("layer")
        net.layer.extend(layers)
    for name in ("input", "input_shape", "input_dim"):
        net.ClearField(name)


def _input_layer(names: list[str], shapes: list[list[int]]) -> LayerParameter:
    layer = LayerParameter(name="input", type="Input", top=names)
    for shape in shapes[: len(names)]:
        layer.input_param.shape.add(dim=shape)
    return layer


def _freeze_batch_norm(layer: LayerParameter) -> None:
    """Set the multipliers of BatchNorm's three running sums to zero, which the old form spelled out."""
    if layer.type == "BatchNorm" and len(layer.param) == 3:
        for spec in layer.param:
            spec.lr_mult = 0
            spec.decay_mult = 0
