"""Caffe's layer types, one file per family; importing this package registers them all."""

from typing import Any

from poseidon.caffe.layers import (
    arrange,
    class_losses,
    convolution,
    crop,
    data,
    dropout,
    dummy_data,
    eltwise,
    embed,
    hdf5_data,
    hdf5_output,
    im2col,
    image_data,
    inner_product,
    losses,
    lrn,
    memory_data,
    neurons,
    normalization,
    parameter,
    pooling,
    prelu,
    python,
    recurrent,
    reduction,
    rows,
    scale,
    scores,
    softmax,
    spp,
    window_data,
    wiring,
)
from poseidon.caffe.layers.base import Layer
from poseidon.caffe.layers.registry import create, known_types, register

__all__ = [
    "Layer",
    "arrange",
    "class_losses",
    "convolution",
    "create",
    "crop",
    "data",
    "dropout",
    "dummy_data",
    "eltwise",
    "embed",
    "hdf5_data",
    "hdf5_output",
    "im2col",
    "image_data",
    "inner_product",
    "known_types",
    "losses",
    "lrn",
    "memory_data",
    "neurons",
    "normalization",
    "parameter",
    "pooling",
    "prelu",
    "python",
    "recurrent",
    "reduction",
    "register",
    "rows",
    "scale",
    "scores",
    "softmax",
    "spp",
    "window_data",
    "wiring",
]


def __getattr__(name: str) -> Any:
    """Return the function of pycaffe's ``caffe.layers`` that adds a layer of type ``name`` to a net spec."""
    if not (name[:1].isupper() or name in known_types()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from poseidon.caffe import net_spec

    return getattr(net_spec.layers, name)
