"""The kernels that take zeros out of rows, beside PyTorch's operations; in a process of their own, as others are."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch
from test_compact_kernels import DEVICE, run_apart
from torch import Tensor

from poseidon.routes import zeros
from poseidon.routes.room import INTEGERS, RoomLayout, count_filled

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton; scripts/setup kernels installs it")
SHAPES = ((1, 1), (1, 7), (3, 5), (2, 1024), (5, 409), (9, 700), (32, 200))
"""Less than a block of values, a whole one, several and a part; whole bytes of bits, and others."""


def _rows(shape: tuple[int, int], dtype: torch.dtype, filled: float, seed: int) -> Tensor:
    """Return any bits, not-a-numbers and negative zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**15), 2**15, shape, generator=generator).to(INTEGERS[dtype.itemsize])
    integers <<= 8 * dtype.itemsize - 16
    integers.view(-1)[:1] = torch.iinfo(integers.dtype).min
    return torch.where(torch.rand(shape, generator=generator) < filled, integers, 0).view(dtype).to(DEVICE)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _try(shape: tuple[int, int], dtype: torch.dtype, filled: float) -> None:
    each = [_rows(shape, dtype, filled, seed) for seed in range(3)]
    counts = [int(count_filled(rows)) for rows in each]
    # The last worker has more than fits, unless all have the same.
    layout = RoomLayout(*shape, sorted(counts)[1], dtype)
    dropped = [zeros.drop_by_kernels(layout, rows) for rows in each]
    assert [int(count) for _, count in dropped] == counts
    for rows, count, (data, _) in zip(each, counts, dropped, strict=True):
        if count <= layout.values:
            assert _same(data, layout.drop_zeros(rows)[0])
    sent = torch.cat([data for data, _ in dropped])
    restored = zeros.restore_by_kernels(layout, sent).view(3, *shape)
    for rows, count, found in zip(each, counts, restored, strict=True):
        if count <= layout.values:
            assert _same(found, rows)


def _main() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for shape in SHAPES:
            for filled in (0.0, 0.4, 1.0):
                print(dtype, shape, filled, flush=True)
                _try(shape, dtype, filled)
        assert zeros.kernels_work(torch.device(DEVICE), dtype)


def _compile() -> None:
    """What Triton's interpreter accepts, its compiler may not; that needs no GPU."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    from poseidon.routes import zeros_kernels as kernels

    for kernel in (kernels.count_values, kernels.drop, kernels.count_bits, kernels.restore):
        for itemsize in (16, 32, 64):
            kinds = dict.fromkeys(kernel.arg_names, "i32")
            kinds |= dict.fromkeys(("rows", "values", "integers"), f"*i{itemsize}")
            kinds |= {"data": "*u8", "counts": "*i32", "sums": "*i32", "size": "constexpr"}
            source = compiler.ASTSource(kernel, {name: kinds[name] for name in kernel.arg_names}, {"size": 2048})
            compiler.compile(source, target=GPUTarget("cuda", 90, 32))


def test_kernels_write_and_read_what_pytorch_does() -> None:
    run_apart(__file__, "_main", interpreted=DEVICE != "cuda")


def test_kernels_compile() -> None:
    run_apart(__file__, "_compile", interpreted=False)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
