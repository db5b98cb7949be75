"""Poseidon needs no more memory than torch's DistributedDataParallel plus the factors under way."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
from torch import nn

from ranks import run_ranks
from twins import wrap, wrap_torch

WIDTH, LAYERS, ROWS, WORKERS = 1536, 4, 8, 2
FACTOR_BYTES = LAYERS * WORKERS * ROWS * 2 * WIDTH * 4
SLACK_BYTES = 4 * 2**20
"""Allocator, threads and sockets; far below the 9 MB per layer and copy that are looked for."""

_M_MMAP_THRESHOLD = -3
"""From malloc.h."""


def _peak_growth(system: str) -> int:
    """Return by how much the process's peak memory grows by wrapping and training."""
    # What is alive counts, not how malloc arranges it: every tensor of 1 MB or more gets pages of its own, which go
    # back when it is freed. Otherwise malloc keeps large blocks once some were freed, and peaks differ by whole layers.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    x = torch.randn(ROWS, WIDTH)
    model(x).sum().backward()  # what any training needs: gradients and BLAS buffers
    model.zero_grad(set_to_none=False)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _peak()
    wrapped = wrap(model) if system == "poseidon" else wrap_torch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        wrapped(x).square().mean().backward()
        optimizer.step()
    if system == "poseidon":
        assert set(wrapped.plan.routes.values()) == {"factors"}
    return _peak() - before


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_peak_memory_is_at_most_torchs_plus_the_factors() -> None:
    torchs = max(run_ranks(_peak_growth, WORKERS, "torch"))
    ours = max(run_ranks(_peak_growth, WORKERS, "poseidon"))
    assert ours <= torchs + FACTOR_BYTES + SLACK_BYTES, f"{ours / 2**20:.1f} MiB against {torchs / 2**20:.1f} MiB"
