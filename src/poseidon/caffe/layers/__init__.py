"""Caffe's layer types, one file per family; importing this package registers them all."""

from poseidon.caffe.layers import (
    convolution,
    crop,
    im2col,
    inner_product,
    lrn,
    neurons,
    normalization,
    pooling,
    scale,
    softmax,
    spp,
    wiring,
)
from poseidon.caffe.layers.base import Layer
from poseidon.caffe.layers.registry import create, known_types, register

__all__ = [
    "Layer",
    "convolution",
    "create",
    "crop",
    "im2col",
    "inner_product",
    "known_types",
    "lrn",
    "neurons",
    "normalization",
    "pooling",
    "register",
    "scale",
    "softmax",
    "spp",
    "wiring",
]
