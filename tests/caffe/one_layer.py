"""Builds a net of Input blobs and one layer, and runs it on arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poseidon.caffe import TEST, Net
from poseidon.caffe.schema import NetParameter
from poseidon.caffe.schema.files import parse_text


def build(layer: str, bottoms: Sequence[Sequence[int]] = (), tops: Sequence[str] = ("top",), phase: int = TEST) -> Net:
    """Return a net whose inputs ``b0``, ``b1`` ... have the given shapes and whose last layer is ``subject``."""
    parts = ["force_backward: true"]
    for i, shape in enumerate(bottoms):
        dims = " ".join(f"dim: {size}" for size in shape)
        parts.append(f'layer {{ name: "b{i}" type: "Input" top: "b{i}" input_param {{ shape {{ {dims} }} }} }}')
    ends = " ".join([*(f'bottom: "b{i}"' for i in range(len(bottoms))), *(f'top: "{name}"' for name in tops)])
    parts.append(f'layer {{ name: "subject" {ends} {layer} }}')
    param = parse_text("\n".join(parts), NetParameter)
    param.state.phase = phase
    return Net.from_proto(param)


def forward(net: Net, *values: object) -> list[np.ndarray]:
    """Fill the inputs, run forward, return the last layer's tops."""
    for i, array in enumerate(values):
        net.blobs[f"b{i}"].data[...] = array
    net.run_forward()
    return [blob.data.copy() for blob in net.tops_of(len(net.layers) - 1)]


def backward(net: Net, *diffs: object) -> list[np.ndarray]:
    """Set the gradients of the last layer's tops, run backward, return the inputs' gradients."""
    net.clear_param_diffs()
    for blob, diff in zip(net.tops_of(len(net.layers) - 1), diffs, strict=True):
        blob.diff[...] = diff
    net.run_backward()
    return [net.blobs[name].diff.copy() for name in net.inputs]


def apply(layer: str, *values: object, tops: Sequence[str] = ("top",)) -> list[np.ndarray]:
    """Build a net for the given arrays and return what the layer makes of them."""
    arrays = [np.asarray(value, np.float32) for value in values]
    return forward(build(layer, [array.shape for array in arrays], tops), *arrays)
