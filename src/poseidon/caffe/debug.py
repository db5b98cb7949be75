"""The lines a net logs while it is built and, with ``debug_info``, at every layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from poseidon.caffe.blob import Blob
from poseidon.caffe.layers.base import Layer

if TYPE_CHECKING:
    from poseidon.caffe.net import BuiltNet

log = logging.getLogger("poseidon.caffe")


def log_setup(layer: Layer, tops: Sequence[Blob], values_so_far: int) -> None:
    """Log the shapes of a new layer's tops and the memory of the net so far."""
    log.info("Setting up %s", layer.name)
    for top, weight in zip(tops, layer.loss_weights, strict=True):
        log.info("Top shape: %s", shape_string(top))
        if weight:
            log.info("    with loss weight %g", weight)
    log.info("Memory required for data: %d", values_so_far * 4)


def shape_string(blob: Blob) -> str:
    """Return a shape as Caffe prints it: ``64 3 28 28 (150528)``."""
    return "".join(f"{size} " for size in blob.shape) + f"({blob.count})"


def log_forward(net: BuiltNet, index: int) -> None:
    """Log the mean magnitude of a layer's tops and parameters."""
    layer = net.layers[index]
    for name_index, top in zip(net.top_ids(index), net.tops_of(index), strict=True):
        name = net.blob_names[name_index]
        log.info("    [Forward] Layer %s, top blob %s data: %g", layer.name, name, _mean_abs(top.data_tensor))
    for number, blob in enumerate(layer.blobs):
        name = net.param_table.at(index, number).display_name
        log.info("    [Forward] Layer %s, param blob %s data: %g", layer.name, name, _mean_abs(blob.data_tensor))


def log_backward(net: BuiltNet, index: int) -> None:
    """Log the mean magnitude of the gradients a layer has computed."""
    layer = net.layers[index]
    for blob_id, bottom, wanted in zip(net.bottom_ids(index), net.bottoms_of(index), layer.propagate_down, strict=True):
        if wanted:
            name = net.blob_names[blob_id]
            log.info(
                "    [Backward] Layer %s, bottom blob %s diff: %g", layer.name, name, _mean_abs(bottom.diff_tensor)
            )
    for number, (blob, wanted) in enumerate(zip(layer.blobs, layer.param_propagate_down, strict=True)):
        if wanted:
            log.info("    [Backward] Layer %s, param blob %d diff: %g", layer.name, number, _mean_abs(blob.diff_tensor))


def log_norms(net: BuiltNet) -> None:
    """Log the norms of all parameters and their gradients together."""
    data = [param.blob.data_tensor for param in net.learnable]
    diff = [param.blob.diff_tensor for param in net.learnable]
    log.error(
        "    [Backward] All net params (data, diff): L1 norm = (%g, %g); L2 norm = (%g, %g)",
        sum(float(t.abs().sum()) for t in data),
        sum(float(t.abs().sum()) for t in diff),
        math.sqrt(sum(float(t.square().sum()) for t in data)),
        math.sqrt(sum(float(t.square().sum()) for t in diff)),
    )


def _mean_abs(values: torch.Tensor) -> float:
    return float(values.abs().mean()) if values.numel() else 0.0
