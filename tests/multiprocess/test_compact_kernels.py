"""Kernels in a process of their own: where there is no GPU, Triton must know that before it is imported."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

import compact_twin
from compact_twin import same_bits
from poseidon.sums.compact import CompactLayout

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton; scripts/setup kernels installs it")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Array = np.ndarray[Any, Any]


def _draw(kind: str, size: int) -> Array:
    generator = np.random.default_rng(size)
    values = generator.standard_normal(size).astype(np.float32)
    if kind == "zeros":
        values[generator.random(size) < 0.7] = 0
        values[generator.random(size) < 0.1] *= np.float32(-0.0)
    elif kind == "strays":
        values[generator.random(size) < 0.02] *= np.float32(1e-12)
        values[5], values[9], values[11] = np.nan, 1e-42, np.inf
    elif kind == "wide":
        values *= np.float32(10) ** generator.integers(-30, 8, size).astype(np.float32)
    elif kind == "any bits":
        values = generator.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    return values


def _compact_and_restore(kind: str, chunks: int, quotient: int, longer: int) -> None:
    from poseidon.sums import compact_kernels as kernels

    values = _draw(kind, chunks * quotient + longer)
    layout = CompactLayout(quotient + (longer > 0))
    flat = torch.from_numpy(values).to(DEVICE)
    rows = torch.full((chunks, layout.row_bytes), 77, dtype=torch.uint8, device=DEVICE)
    kernels.compact(flat, quotient, longer, rows, layout)
    back = torch.empty_like(flat)
    kernels.restore(rows, layout, back, quotient, longer)

    compacted, restored = rows.cpu().numpy(), back.cpu().numpy()
    for index, row in enumerate(compacted):
        start = index * quotient + min(index, longer)
        part = values[start : start + quotient + (index < longer)]
        expected = compact_twin.compact(part, layout)
        (strays,) = row[:4].view("<u4")
        assert (expected is None) == (strays > layout.most_strays)
        if expected is not None:
            end = layout.tops_at + layout.groups
            assert row[:end].tobytes() == expected[:end]
            # Strays come in any order.
            ours = np.frombuffer(row[layout.strays_at :][: 4 * strays].tobytes(), "<u4")
            assert sorted(ours) == sorted(np.frombuffer(expected[layout.strays_at :], "<u4"))
            assert same_bits(compact_twin.restore(expected, len(part), layout), part)
            assert same_bits(restored[start : start + len(part)], part)


def _add_up() -> None:
    from poseidon.sums import compact_kernels as kernels

    for place in range(4):
        generator = np.random.default_rng(place)
        parts = (generator.standard_normal((3, 5000)) * [[1e4], [1], [1e-3]]).astype(np.float32)
        values = generator.standard_normal(9000).astype(np.float32)
        # The smallest numbers there are must not become zeros.
        parts[:, :50] = values[100:150] = np.float32(1e-42)
        flat = torch.from_numpy(values.copy()).to(DEVICE)
        kernels.add_up(torch.from_numpy(parts).to(DEVICE), flat[100:5100], place)

        in_order = list(parts)
        in_order.insert(place, values[100:5100])
        expected = values.copy()
        expected[100:5100] = functools.reduce(np.add, in_order)
        assert same_bits(flat.cpu().numpy(), expected)


def _divide() -> None:
    from poseidon.sums import compact_kernels as kernels

    values = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    values[:3] = np.inf, -0.0, 3e-45
    for divisor in (3, 8):
        flat = torch.from_numpy(values.copy()).to(DEVICE)
        kernels.divide(flat, divisor)
        assert same_bits(flat.cpu().numpy(), values / np.float32(divisor))


def _main() -> None:
    for kind in ["normal", "zeros", "strays", "wide", "any bits"]:
        for chunks, quotient, longer in [(1, 4096, 0), (4, 5000, 3), (3, 8191, 2)]:
            print(f"compacting {chunks} chunks of {quotient} values, {longer} of them longer: {kind}", flush=True)
            _compact_and_restore(kind, chunks, quotient, longer)
    print("adding up", flush=True)
    _add_up()
    print("dividing", flush=True)
    _divide()


def test_kernels_compact_like_the_twin_restore_all_bits_and_add_in_the_order_of_ranks() -> None:
    interpreted = {} if DEVICE == "cuda" else {"TRITON_INTERPRET": "1"}
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, **interpreted, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout


if __name__ == "__main__":
    _main()
