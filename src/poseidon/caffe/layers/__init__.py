"""Caffe's layer types, one file per family; importing this package registers them all."""

from poseidon.caffe.layers import (
    inner_product,
    neurons,
    softmax,
    wiring,
)
from poseidon.caffe.layers.base import Layer
from poseidon.caffe.layers.registry import create, known_types, register

__all__ = ["Layer", "create", "inner_product", "known_types", "neurons", "register", "softmax", "wiring"]
