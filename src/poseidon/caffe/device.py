"""Where nets compute: Caffe's process-wide CPU or GPU mode."""

from __future__ import annotations

import logging

import torch

from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

_active = torch.device("cpu")
_gpu_index = 0


def active() -> torch.device:
    """Return the device on which blobs live and layers compute."""
    return _active


def set_mode_cpu() -> None:
    """Compute on the CPU from now on."""
    global _active
    _active = torch.device("cpu")


def set_mode_gpu() -> None:
    """Compute on the chosen GPU from now on; on a machine without one, on the CPU, with a warning."""
    global _active
    if not torch.cuda.is_available():
        # As for solver_mode: scripts and solvers that name the GPU run everywhere.
        log.warning("set_mode_gpu: this machine has no usable GPU: computing on the CPU")
        set_mode_cpu()
        return
    _active = torch.device("cuda", _gpu_index)


def set_device(index: int) -> None:
    """Select the GPU for ``set_mode_gpu``."""
    global _active, _gpu_index
    count = torch.cuda.device_count()
    if index < 0 or (count and index >= count):
        raise ConfigError(f"set_device: GPU {index} does not exist; this machine has {count}")
    _gpu_index = index
    if _active.type == "cuda":
        _active = torch.device("cuda", index)
