from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ServerError
from poseidon.sums.lossy import SEGMENT, Bf16Codec, Int4Codec, Int8Codec, LossyCodec, TopKCodec, keep_rest

Array = np.ndarray[Any, Any]

CODECS: list[LossyCodec] = [Bf16Codec(), Int8Codec(), Int8Codec(64), Int4Codec(), TopKCodec(), TopKCodec(0.3)]
LENGTHS = [1, 7, 64, 255, 256, 257, 1000, 5 * 256, SEGMENT + 3]


def values_of(length: int, seed: int = 0) -> Array:
    """Return values of very different sizes, as gradients are; some are zero."""
    generator = np.random.default_rng([seed, length])
    values = generator.standard_normal(length) * 10.0 ** generator.integers(-6, 3, length)
    values[generator.random(length) < 0.1] = 0
    return values.astype(np.float32)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_chunk_has_the_size_it_says_and_decodes_alike_every_time(codec: LossyCodec, length: int) -> None:
    payload = codec.encode(values_of(length))
    assert payload.dtype == np.uint8
    assert codec.sizes(length) == range(payload.nbytes, payload.nbytes + 1)
    assert codec.measure(payload.data) == payload.nbytes
    first, second = codec.decode(payload, length), codec.decode(payload.copy(), length)
    assert first.dtype == np.float32
    assert first.shape == (length,)
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_what_was_sent_and_what_is_kept_are_the_value_exactly(codec: LossyCodec, length: int) -> None:
    # Whole numbers below 2^12, in multiples of a power of two: every difference fits float32, so equality is exact.
    generator = np.random.default_rng(length)
    values = (generator.integers(-4095, 4096, length) * 2.0**-20).astype(np.float32)
    decoded, kept = codec.decode(codec.encode(values), length), np.full(length, np.nan, np.float32)
    sent = decoded.astype(np.float64)
    keep_rest(values, decoded, kept)
    if isinstance(codec, Int8Codec):
        # A scale is no power of two, so the difference may need one bit more than there is.
        np.testing.assert_allclose(sent + kept, values, rtol=0, atol=2.0**-24 * np.abs(values).max())
    else:
        assert np.array_equal(sent + kept, values)


@given(st.integers(0, 2**32 - 1), st.integers(1, 700))
def test_int8_is_off_by_half_a_step_at_most(seed: int, length: int) -> None:
    codec = Int8Codec(64)
    values = values_of(length, seed)
    decoded = codec.decode(codec.encode(values), length)
    for start in range(0, length, 64):
        block = slice(start, min(start + 64, length))
        # The scale is rounded up to bf16, so a step is at most 2^-7 larger than the largest value needs.
        step = np.abs(values[block]).max() / 127 * (1 + 2.0**-7)
        errors = np.abs(values[block].astype(np.float64) - decoded[block])
        is_coarse = np.arange(64) >= 56 if block.stop - block.start == 64 else np.zeros(block.stop - start, bool)
        assert (errors[~is_coarse] <= step / 2 * 1.001).all()
        assert (errors[is_coarse] <= 18 * step / 2 * 1.001).all()


def test_int8_takes_less_than_a_quarter_of_float32() -> None:
    for block in (32, 64, 256, 1024):
        assert Int8Codec(block).sizes(1 << 18).start < 1 << 18
    assert Int8Codec().sizes(1 << 18).start == (1 << 18) * 254 // 256
    # A chunk that ends within a block has its scale in addition.
    assert Int8Codec().sizes((1 << 16) + 100).start < (1 << 16) + 100


def test_int4_takes_about_an_eighth_and_is_off_by_half_a_step_at_most() -> None:
    codec, values = Int4Codec(), values_of(1 << 14)
    assert codec.sizes(1 << 14).start == (1 << 14) // 2 + 2 * (1 << 14) // 128
    errors = np.abs(values.astype(np.float64) - codec.decode(codec.encode(values), values.size))
    # Seven of eighteen steps of INT8 reach 126 of 127; the scale is rounded up to bf16.
    step = np.abs(values.reshape(-1, 128)).max(1) * 18 / 127 * (1 + 2.0**-7)
    assert (errors.reshape(-1, 128) <= step[:, None] / 2 * 1.001).all()
    assert errors.max() > step.max() / 8


def test_topk_keeps_the_largest_as_they_are() -> None:
    values = values_of(2 * SEGMENT + 100)
    codec = TopKCodec(0.02)
    decoded = codec.decode(codec.encode(values), values.size)
    for start in range(0, values.size, SEGMENT):
        segment, found = values[start : start + SEGMENT], decoded[start : start + SEGMENT]
        is_sent = found != 0
        assert is_sent.sum() == -(-segment.size * 2 // 100)
        assert np.array_equal(found[is_sent], segment[is_sent])
        assert np.abs(segment[is_sent]).min() >= np.abs(segment[~is_sent]).max()


def test_places_that_a_chunk_does_not_have_are_refused() -> None:
    codec = TopKCodec(0.5)
    payload = codec.encode(values_of(10))
    payload[-2:] = 0xFF
    with pytest.raises(ServerError, match="10 values came with value 65535"):
        codec.decode(payload, 10)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_not_finite_arrives_so_and_is_never_kept(codec: LossyCodec, bad: float) -> None:
    values = values_of(600)
    values[300] = bad
    kept = np.linspace(1, 2, 600, dtype=np.float32)
    before = kept.copy()
    decoded = codec.decode(codec.encode(values), 600)
    assert not np.isfinite(decoded[300])
    assert np.isfinite(decoded[:256]).all()
    sent = decoded[:256].copy()
    keep_rest(values, decoded, kept)
    assert np.isfinite(kept).all()
    assert kept[300] == before[300]
    np.testing.assert_allclose(sent + kept[:256], values[:256], rtol=1e-5)


def test_values_near_the_ends_of_float32_survive() -> None:
    codec = Int8Codec(32)
    for size in (1e-44, 1e-38, 1e38, 3.4e38):
        values = np.linspace(-size, size, 32).astype(np.float32)
        decoded = codec.decode(codec.encode(values), 32)
        assert np.isfinite(decoded).all()
        kept = np.zeros(32, np.float32)
        keep_rest(values, decoded, kept)
        assert np.isfinite(kept).all()
