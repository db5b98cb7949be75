"""Profiles of Caffe nets: from a prototxt's shapes, or measured layer by layer. Needs torch.

Data layers that state a crop size are replaced by inputs of that shape, so that no database is needed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poseidon.errors import ConfigError
from poseidon.planning.profile import Profile, UnitProfile
from poseidon.profiling.measuring import BACKWARD_RATIO, MEMORY_PER_FLOP, UPDATE_PASSES

if TYPE_CHECKING:
    from poseidon.caffe.net import BuiltNet

_COLOURS = 3
_ITEM_BYTES = 4


def profile_prototxt(path: str | Path, batch: int, flops: float, is_measured: bool = False) -> Profile:
    """Return the profile of a net's training phase (or of a deploy net) with ``batch`` samples per worker.

    Estimated from shapes at the device's matrix rate, or measured on this machine's CPU over two passes.
    """
    from poseidon.caffe.net_units import find_net_units

    net = _build(path, batch if is_measured else 1)
    units = find_net_units(net)
    if not units:
        # A deploy net has no loss, so nothing in it would learn.
        net = _build(path, batch if is_measured else 1, force_backward=True)
        units = find_net_units(net)
    if not units:
        raise ConfigError(f"{path}: no layer of this net learns, so there is nothing to exchange")
    forward, backward = _measure(net) if is_measured else _estimate(net, flops)
    made = []
    for place, unit in enumerate(units):
        # A unit accounts for all layers from its own up to the next unit's, which have no parameters.
        begin = unit.layer_index if place else 0
        end = units[place + 1].layer_index if place + 1 < len(units) else len(net.layers)
        load = unit.load(net) if unit.kind != "dense" else None
        made.append(UnitProfile(unit.live.spec, load, sum(forward[begin:end]), sum(backward[begin:end])))
    order = tuple(range(len(made)))
    profile = Profile(
        model=str(path),
        device="cpu" if is_measured else f"{flops / 1e9:.4g} GFLOP/s",
        batch=batch if is_measured else 1,
        units=tuple(made),
        forward_order=order,
        ready_order=order[::-1],
        update_s=UPDATE_PASSES * sum(one.unit.size_bytes for one in made) / (flops * MEMORY_PER_FLOP),
        source="measured" if is_measured else "estimated",
    )
    return profile if is_measured else replace(profile.with_batch(batch), source="estimated")


def _build(path: str | Path, batch: int, force_backward: bool = False) -> BuiltNet:
    from poseidon.caffe.net import BuiltNet
    from poseidon.caffe.schema import TRAIN
    from poseidon.caffe.upgrade import read_net

    param = read_net(path)
    param.state.phase = TRAIN
    param.force_backward = param.force_backward or force_backward
    for layer in param.layer:
        _take_input(layer, batch)
    try:
        return BuiltNet(param)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; if its data are not here, plan the deploy form of the net") from error


def _take_input(layer: Any, batch: int) -> None:
    """Set the batch of an input layer, and replace a data layer whose image size is known by an input layer."""
    if layer.type == "Input":
        for shape in layer.input_param.shape:
            if shape.dim:
                shape.dim[0] = batch
        return
    size = layer.transform_param.crop_size
    if layer.bottom or not size:
        return
    layer.type = "Input"
    shapes = [(batch, _COLOURS, size, size), (batch,)][: len(layer.top)]
    for dims in shapes:
        layer.input_param.shape.add().dim.extend(dims)


def _measure(net: BuiltNet) -> tuple[list[float], list[float]]:
    from poseidon.caffe.scoring import benchmark

    passes = 2
    times = benchmark(net, passes)
    return [ms / passes / 1e3 for ms in times.forward], [ms / passes / 1e3 for ms in times.backward]


def _estimate(net: BuiltNet, flops: float) -> tuple[list[float], list[float]]:
    """Return every layer's seconds: the longer of its arithmetic and its traffic."""
    forward = [_layer_s(net, index, flops) for index in range(len(net.layers))]
    backward = [
        BACKWARD_RATIO * seconds if layer.needs_backward else 0.0
        for seconds, layer in zip(forward, net.layers, strict=True)
    ]
    return forward, backward


def _layer_s(net: BuiltNet, index: int, flops: float) -> float:
    layer = net.layers[index]
    tops, bottoms = net.tops_of(index), net.bottoms_of(index)
    traffic = _ITEM_BYTES * sum(blob.count for blob in (*tops, *bottoms, *layer.blobs))
    work = 0.0
    if layer.type in ("Convolution", "InnerProduct") and layer.blobs and tops:
        weight = layer.blobs[0]
        channels = tops[0].shape[1] if layer.type == "Convolution" else layer.param.inner_product_param.num_output
        work = 2.0 * sum(top.count for top in tops) * weight.count / channels
    elif layer.type == "Deconvolution" and layer.blobs:
        work = 2.0 * sum(bottom.count for bottom in bottoms) * layer.blobs[0].count / bottoms[0].shape[1]
    return float(max(work / flops, traffic / (flops * MEMORY_PER_FLOP)))
