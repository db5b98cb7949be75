"""pycaffe's interface, executed by PyTorch: ``import poseidon.caffe as caffe``."""

from __future__ import annotations

from poseidon.caffe import coord_map, io, layers, proto
from poseidon.caffe.blob import Blob
from poseidon.caffe.classifier import Classifier
from poseidon.caffe.detector import Detector
from poseidon.caffe.device import set_device, set_mode_cpu, set_mode_gpu
from poseidon.caffe.layers import known_types as layer_type_list
from poseidon.caffe.layers import register
from poseidon.caffe.layers.base import Layer as NativeLayer
from poseidon.caffe.layers.python import PythonLayer as Layer
from poseidon.caffe.net_spec import NetSpec, params, to_proto
from poseidon.caffe.process import (
    NCCL,
    Timer,
    has_nccl,
    init_log,
    log,
    set_multiprocess,
    set_random_seed,
    set_solver_count,
    set_solver_rank,
    solver_count,
    solver_rank,
)
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
"""The version of Caffe that this reproduces."""

__all__ = [
    "NCCL",
    "TEST",
    "TRAIN",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "Blob",
    "Classifier",
    "Detector",
    "Layer",
    "NativeLayer",
    "NesterovSolver",
    "Net",
    "NetSpec",
    "RMSPropSolver",
    "SGDSolver",
    "Timer",
    "coord_map",
    "get_solver",
    "has_nccl",
    "init_log",
    "io",
    "layer_type_list",
    "layers",
    "log",
    "params",
    "proto",
    "register",
    "set_device",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_multiprocess",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
    "to_proto",
]
