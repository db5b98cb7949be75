"""The kernels of low rank against plain products, in a process of their own as in ``test_compact_kernels.py``."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec

import pytest
import torch
from test_compact_kernels import DEVICE, run_apart
from torch import Tensor

from poseidon.sums import lowrank_products
from poseidon.sums.lowrank import LowRankLayout, split_bucket
from poseidon.sums.lowrank_products import KernelProducts, Products, TorchProducts

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton; scripts/setup kernels installs it")
SHAPES: list[tuple[int, int] | None] = [(5, 130), None, (70, 33), (1, 64), (9, 9), (70, 2), (2, 90)]
"""Straight and turned ones, smaller and larger than a kernel's pieces, one that is none, and two in several parts."""


ALIGNED: list[tuple[int, int] | None] = [(12, 132), None, (72, 8), (9, 64)]
"""Rows of these begin at multiples of four."""


def _bucket(shapes: list[tuple[int, int] | None], rank: int) -> tuple[LowRankLayout, list[int]]:
    sizes = [8 if shape is None else math.prod(shape) for shape in shapes]
    return split_bucket(sizes, shapes, rank), sizes


def _step(products: Products, layout: LowRankLayout, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return all that the products of one step leave."""
    generator = torch.Generator().manual_seed(3)
    lengths = size, size, layout.right_size, layout.right_size, layout.right_size, layout.left_size
    drawn = [torch.randn(length, generator=generator).to(DEVICE, dtype) for length in lengths]
    flat, rest, bases, right, mean, left = drawn
    products.make_left(flat, rest, bases, left)
    summed = flat.clone(), left.clone()
    left /= left.norm()  # as what comes back is orthonormal
    products.make_right(flat, left, right)
    second = right.clone()
    products.restore(flat, rest, left, right, mean)
    return [*summed, second, flat, rest]


def _main() -> None:
    lowrank_products._LONGEST, lowrank_products._PART = 64, 32  # long sums in parts, without matrices as long
    for shapes, rank in ((SHAPES, 1), (SHAPES[:4], 3), (ALIGNED, 4)):
        print(f"{shapes}, rank {rank}", flush=True)
        layout, sizes = _bucket(shapes, rank)
        found = _step(KernelProducts(layout, sizes, torch.device(DEVICE)), layout, sum(sizes), torch.float32)
        expected = _step(TorchProducts(layout, sizes), layout, sum(sizes), torch.float64)
        again = _step(KernelProducts(layout, sizes, torch.device(DEVICE)), layout, sum(sizes), torch.float32)
        for mine, twin, exact in zip(found, again, expected, strict=True):
            assert torch.equal(mine, twin), "the same values, other bits"
            torch.testing.assert_close(mine, exact.float(), rtol=1e-5, atol=1e-5)


def _digest() -> None:
    """Kernels that work have a digest, the same each time and another one for each rank; others have none."""
    device = torch.device(DEVICE)
    digests = [lowrank_products.kernel_digest(rank, device) for rank in (1, 2, 65)]
    assert digests[0] != digests[1]
    assert [digest > 0 for digest in digests] == [True, True, False]
    lowrank_products.kernel_digest.cache_clear()
    assert lowrank_products.kernel_digest(2, device) == digests[1]


def _compile() -> None:
    """What Triton's interpreter accepts, its compiler may not; that needs no GPU."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    from poseidon.sums import lowrank_kernels as kernels

    shared = {"rank": 4, "many_rows": 32, "many_columns": 64}
    for kernel, fixed in (
        *(
            (kernels.narrow, {**shared, "rank_room": 4, "along_rows": way, "adds": way, "step": 4 if way else 1})
            for way in (False, True)
        ),
        *((kernels.widen, {**shared, "step": step}) for step in (1, 4)),
    ):
        kinds = {name: "constexpr" if name in fixed else "*fp32" for name in kernel.arg_names}
        source = compiler.ASTSource(kernel, {**kinds, "table": "*i64"}, fixed)
        compiler.compile(source, target=GPUTarget("cuda", 90, 32))


def test_kernels_multiply_add_and_keep_like_plain_products_and_alike_each_time() -> None:
    run_apart(__file__, "_main", interpreted=DEVICE != "cuda")


def test_kernels_have_a_digest() -> None:
    run_apart(__file__, "_digest", interpreted=DEVICE != "cuda")


def test_kernels_compile() -> None:
    run_apart(__file__, "_compile", interpreted=False)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
