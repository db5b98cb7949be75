"""Where nets compute: Caffe's process-wide CPU or GPU mode."""

from __future__ import annotations

import torch

from poseidon.errors import ConfigError

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
    """Compute on the chosen GPU from now on."""
    global _active
    if not torch.cuda.is_available():
        raise ConfigError("set_mode_gpu: this machine has no usable CUDA device; use set_mode_cpu instead")
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
