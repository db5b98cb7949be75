"""The compacted format: whatever the values are, restoring them gives the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compact_codec import compact, restore, same_bits
from poseidon.sums.compact import GROUP, CompactLayout, align

Array = np.ndarray[Any, Any]

SPECIAL = {
    "zeros": [0x00000000],
    "negative zeros": [0x80000000],
    "equal": [0x3F9D70A4],
    "NaN payloads": [0x7FC00001, 0xFFA5A5A5, 0x7F800001],
    "infinities": [0x7F800000, 0xFF800000],
    "subnormals": [0x00000001, 0x807FFFFF, 0x00400000],
    "subnormals beside infinities": [0x00000001, 0x7F800000],
    "strays": [0x00800000, 0x7F7FFFFF],
    "strays but one": [0x7F7FFFFF, *[0x00812345] * 255],
    "all distances": [*range(0x3F800000, 0x37000000, -0x00800000)],
    "eighth distances": [0x40000000, *[0x3C800123] * 20, 0x3C000123],
    "farthest distances": [0x40000000, 0x39000000, 0x38800000, 0x38000000],
    "bf16": [0x3F9D0000, 0xBEEF0000],
    "only the lowest bit": [0x3F800001, 0x3F800000, 0x3F800000],
}


@pytest.mark.parametrize("length", [1, 127, 128, 255, 256, 257, 511, 5000])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_come_back(name: str, length: int) -> None:
    values = np.resize(np.array(SPECIAL[name], np.uint32), length).view(np.float32)
    for layout in (CompactLayout(length), CompactLayout(length + 1)):
        compacted = compact(values, layout)
        assert layout.measure(memoryview(compacted)) == len(compacted)
        assert same_bits(restore(compacted, length, layout), values)


@given(
    st.lists(
        st.tuples(
            # A run of values: how many, which bits they have, and which of these vary.
            st.integers(1, 300),
            st.integers(0, 2**32 - 1),
            st.sampled_from([0, 1, 0xFF, 0xF000, 0xFFFF, 0x7FFFFF, 0x807F0000, 0x07FFFFFF, 0xFFFF0000, 0xFFFFFFFF]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_any_bits_come_back(runs: list[tuple[int, int, int]], seed: int) -> None:
    generator = np.random.default_rng(seed)
    pieces = [
        np.uint32(bits) ^ (generator.integers(0, 2**32, count, dtype=np.uint32) & np.uint32(varying))
        for count, bits, varying in runs
    ]
    values = np.concatenate(pieces).view(np.float32)
    layout = CompactLayout(len(values))
    compacted = compact(values, layout)
    assert same_bits(restore(compacted, len(values), layout), values)
    # At worst, a byte for each of the nine planes, and the directory.
    assert len(compacted) <= layout.tail_at + layout.groups * GROUP * 4.5


@given(st.binary(min_size=400, max_size=400), st.integers(0, 400))
def test_any_bytes_can_be_restored(garbage: bytes, tail_bytes: int) -> None:
    layout = CompactLayout(3 * GROUP)
    length = layout.tail_at + tail_bytes
    compacted = (tail_bytes.to_bytes(4, "little") + garbage * 2)[:length]
    assert len(restore(compacted, 3 * GROUP, layout)) == 3 * GROUP


@pytest.mark.parametrize(("itemsize", "plain"), [(4, 40000), (2, 20000)])
def test_a_compacted_chunk_is_shorter_than_a_plain_one_and_both_fit_the_row(itemsize: int, plain: int) -> None:
    layout = CompactLayout(10000, itemsize)
    sizes = layout.sizes(10000)
    assert (sizes.start, sizes.stop) == (16 + 8 * 40, plain)
    assert layout.row_bytes == align(plain)


@pytest.mark.parametrize(
    ("draw", "bits"),
    [
        (lambda values: values, 27.4),
        (lambda values: (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32), 11.4),
        (lambda values: values.astype(np.float16).astype(np.float32), 15.4),
        (lambda values: np.where(np.arange(len(values)) % 8 == 0, values, np.float32(0)), 7.4),
        (np.zeros_like, 0.3),
    ],
    ids=["float32", "bf16", "fp16", "one in eight is not zero", "zeros"],
)
def test_values_take_the_bits_they_need(draw: Any, bits: float) -> None:
    size = 1 << 15
    values = draw(np.random.default_rng(0).standard_normal(size).astype(np.float32))
    # A few strays among normally distributed values.
    assert bits - 0.5 < 8 * len(compact(values, CompactLayout(size))) / size < bits + 0.3
