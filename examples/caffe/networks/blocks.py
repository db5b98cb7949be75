"""Building blocks that several networks share."""

from __future__ import annotations

from typing import Any

from poseidon.caffe import NetSpec
from poseidon.caffe import layers as L
from poseidon.caffe import params as P
from poseidon.caffe.net_spec import Top

WEIGHT_AND_BIAS = [{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 2, "decay_mult": 0}]
"""Biases learn twice as fast and do not decay, as in Caffe's reference models."""


def gaussian(std: float) -> dict[str, Any]:
    """Return a filler with mean 0."""
    return {"type": "gaussian", "std": std}


def constant(value: float) -> dict[str, Any]:
    """Return a filler with one value."""
    return {"type": "constant", "value": value}


def conv(bottom: Top, outputs: int, kernel: int, weight: dict[str, Any], bias: float = 0.0, **settings: Any) -> Top:
    """Return a convolution with bias."""
    settings = {"param": WEIGHT_AND_BIAS} | settings
    top: Top = L.Convolution(
        bottom, num_output=outputs, kernel_size=kernel, weight_filler=weight, bias_filler=constant(bias), **settings
    )
    return top


def dense(bottom: Top, outputs: int, weight: dict[str, Any], bias: float = 0.0, **settings: Any) -> Top:
    """Return a fully connected layer with bias."""
    settings = {"param": WEIGHT_AND_BIAS} | settings
    top: Top = L.InnerProduct(bottom, num_output=outputs, weight_filler=weight, bias_filler=constant(bias), **settings)
    return top


def relu(n: NetSpec, name: str, bottom: Top) -> Top:
    """Add a ReLU in place."""
    n[name] = L.ReLU(bottom, in_place=True)
    top: Top = n[name]
    return top


def dropout(n: NetSpec, name: str, bottom: Top, ratio: float = 0.5) -> Top:
    """Add dropout in place."""
    n[name] = L.Dropout(bottom, in_place=True, dropout_ratio=ratio)
    top: Top = n[name]
    return top


def max_pool(bottom: Top, kernel: int, stride: int, pad: int = 0) -> Top:
    """Return the maximum of each window."""
    padding = {"pad": pad} if pad else {}
    top: Top = L.Pooling(bottom, pool=P.Pooling.MAX, kernel_size=kernel, stride=stride, **padding)
    return top


def mean_pool(bottom: Top, kernel: int, stride: int, pad: int = 0) -> Top:
    """Return the mean of each window."""
    padding = {"pad": pad} if pad else {}
    top: Top = L.Pooling(bottom, pool=P.Pooling.AVE, kernel_size=kernel, stride=stride, **padding)
    return top


def norm_relu(n: NetSpec, names: tuple[str, str, str | None], bottom: Top) -> Top:
    """Add batch normalisation, scale and shift, and (if named) ReLU, all in place."""
    norm, scale, activation = names
    n[norm] = L.BatchNorm(bottom, in_place=True)
    n[scale] = L.Scale(n[norm], in_place=True, bias_term=True)
    top: Top = n[scale]
    return top if activation is None else relu(n, activation, top)
