"""Needs Triton, and a CUDA device or ``TRITON_INTERPRET=1``, with which Triton computes on the CPU."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest
import torch

import compact_twin
from compact_twin import same_bits
from poseidon.server.compact import CompactLayout

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not IS_INTERPRETED:
    pytest.skip("no CUDA device; TRITON_INTERPRET=1 computes on the CPU", allow_module_level=True)
kernels = pytest.importorskip("poseidon.routes.compact_kernels", reason="Triton comes with PyTorch for CUDA")
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
Array = np.ndarray[Any, Any]


def draw(kind: str, size: int) -> Array:
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


@pytest.mark.parametrize("kind", ["normal", "zeros", "strays", "wide", "any bits"])
@pytest.mark.parametrize(("chunks", "quotient", "longer"), [(1, 4096, 0), (4, 5000, 3), (3, 8191, 2)])
def test_kernels_compact_as_the_twin_and_restore_the_same_bits(
    kind: str, chunks: int, quotient: int, longer: int
) -> None:
    values = draw(kind, chunks * quotient + longer)
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
            ours, theirs = (np.frombuffer(b, "<u4") for b in (row.tobytes(), expected.ljust(len(row), b"\0")))
            where = slice(layout.strays_at // 4, layout.strays_at // 4 + strays)
            assert sorted(ours[where]) == sorted(theirs[where])
            assert same_bits(compact_twin.restore(expected, len(part), layout), part)
            assert same_bits(restored[start : start + len(part)], part)


@pytest.mark.parametrize("place", range(4))
def test_parts_are_added_in_the_order_of_ranks(place: int) -> None:
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
