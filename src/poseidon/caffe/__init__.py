"""pycaffe's interface, executed by PyTorch: ``import poseidon.caffe as caffe``."""

from __future__ import annotations

import torch

from poseidon.caffe.blob import Blob
from poseidon.caffe.device import set_device, set_mode_cpu, set_mode_gpu
from poseidon.caffe.layers import known_types as layer_type_list
from poseidon.caffe.layers import register
from poseidon.caffe.layers.base import Layer as NativeLayer
from poseidon.caffe.layers.python import PythonLayer as Layer
from poseidon.caffe.pycaffe import Net
from poseidon.caffe.schema import TEST, TRAIN
from poseidon.caffe.solver import (
    AdaDeltaSolver,
    AdaGradSolver,
    AdamSolver,
    NesterovSolver,
    RMSPropSolver,
    SGDSolver,
    get_solver,
)

__version__ = "1.0.0"
"""The version of Caffe whose behaviour this follows."""

__all__ = [
    "TEST",
    "TRAIN",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "Blob",
    "Layer",
    "NativeLayer",
    "NesterovSolver",
    "Net",
    "RMSPropSolver",
    "SGDSolver",
    "get_solver",
    "layer_type_list",
    "register",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_random_seed",
]


def set_random_seed(seed: int) -> None:
    """Make fillers, dropout and shuffling repeatable."""
    torch.manual_seed(seed)
