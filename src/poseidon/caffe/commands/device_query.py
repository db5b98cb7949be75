"""``poseidon device-query``: what this machine can compute on."""

from __future__ import annotations

import argparse
import os
from typing import Any

from poseidon.caffe.commands.flags import add_caffe_flags
from poseidon.errors import ConfigError

_FACTS = (
    ("Major revision number", "major"),
    ("Minor revision number", "minor"),
    ("Name", "name"),
    ("Total global memory", "total_memory"),
    ("Total shared memory per block", "shared_memory_per_block"),
    ("Total registers per multiprocessor", "regs_per_multiprocessor"),
    ("Warp size", "warp_size"),
    ("Maximum threads per multiprocessor", "max_threads_per_multi_processor"),
    ("Number of multiprocessors", "multi_processor_count"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_caffe_flags(parser, ("gpu",))


def run(args: argparse.Namespace) -> int:
    """Print the requested GPUs (default all) and the CPU."""
    import torch

    from poseidon.caffe.training import parse_gpus

    count = torch.cuda.device_count()
    for index in parse_gpus(args.gpu) or range(count):
        if index >= count:
            raise ConfigError(f"--gpu {index}: this machine has {count} usable GPUs")
        print("\n".join(gpu_lines(index, torch.cuda.get_device_properties(index))))
    if not count:
        print("no usable CUDA device")
    print(f"CPU: {os.cpu_count()} cores, {torch.get_num_threads()} threads by default; torch {torch.__version__}")
    return 0


def gpu_lines(index: int, properties: Any) -> list[str]:
    """Return the facts about a GPU, one line each; those that this torch does not know are left out."""
    facts: list[tuple[str, object]] = [("Device id", index)]
    facts += [(text, getattr(properties, name)) for text, name in _FACTS if hasattr(properties, name)]
    return [f"{text + ':':<36} {value}" for text, value in facts]
