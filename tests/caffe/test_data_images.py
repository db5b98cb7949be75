from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from poseidon.caffe.io.images import decode_image, encode_image, read_image, resized
from poseidon.errors import ConfigError

RANDOM = np.random.default_rng(5)


def png(array):
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, "PNG")
    return stream.getvalue()


def test_colours_come_as_blue_green_red():
    rgb = np.zeros((2, 3, 3), np.uint8)
    rgb[...] = (10, 20, 30)
    assert decode_image(png(rgb), "color")[0, 0].tolist() == [30, 20, 10]
    assert decode_image(png(rgb), "native")[0, 0].tolist() == [30, 20, 10]


@pytest.mark.parametrize(
    ("kind", "native", "color"), [("L", 1, 3), ("LA", 4, 3), ("RGBA", 4, 3), ("P", 3, 3), ("1", 1, 3)]
)
def test_channels_of_every_kind_of_png(kind, native, color):
    picture = Image.fromarray(RANDOM.integers(0, 255, (4, 5, 3)).astype(np.uint8)).convert(kind)
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    assert decode_image(stream.getvalue(), "native").shape == (4, 5, native)
    assert decode_image(stream.getvalue(), "color").shape == (4, 5, color)
    assert decode_image(stream.getvalue(), "gray").shape == (4, 5, 1)


def test_gray_is_the_usual_weighted_sum():
    rgb = RANDOM.integers(0, 255, (6, 7, 3)).astype(np.uint8)
    expected = rgb @ [0.299, 0.587, 0.114]
    assert np.abs(decode_image(png(rgb), "gray")[:, :, 0] - expected).max() <= 1


def test_sixteen_bits_keep_the_upper_eight():
    values = (np.arange(12, dtype=np.uint16) * 5000).reshape(3, 4)
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "PNG")
    assert (decode_image(stream.getvalue(), "gray")[:, :, 0] == values >> 8).all()


def test_transparent_palette_loses_its_alpha():
    picture = Image.fromarray(RANDOM.integers(0, 255, (4, 5, 3)).astype(np.uint8)).convert("P")
    stream = io.BytesIO()
    picture.save(stream, "PNG", transparency=b"\x00\x80\xff")
    assert decode_image(stream.getvalue(), "color").shape == (4, 5, 3)


def test_encoding_and_decoding_png_gives_the_same_pixels():
    for channels in (1, 3):
        pixels = RANDOM.integers(0, 255, (5, 6, channels)).astype(np.uint8)
        assert (decode_image(encode_image(pixels, "png"), "native") == pixels).all()
    assert decode_image(encode_image(pixels, "JPG"), "color").shape == pixels.shape


def test_unknown_encoding_is_refused():
    with pytest.raises(ConfigError, match="cannot encode images as 'docx'"):
        encode_image(np.zeros((2, 2, 3), np.uint8), "docx")


def bilinear(pixels, height, width):
    """The textbook formula in floating point: pixel centres, no smoothing."""
    out = np.empty((height, width, pixels.shape[2]))
    for y in range(height):
        for x in range(width):
            v = min(max((y + 0.5) * pixels.shape[0] / height - 0.5, 0), pixels.shape[0] - 1)
            u = min(max((x + 0.5) * pixels.shape[1] / width - 0.5, 0), pixels.shape[1] - 1)
            y0, x0 = int(v), int(u)
            y1, x1 = min(y0 + 1, pixels.shape[0] - 1), min(x0 + 1, pixels.shape[1] - 1)
            top = pixels[y0, x0] * (1 - (u - x0)) + pixels[y0, x1] * (u - x0)
            low = pixels[y1, x0] * (1 - (u - x0)) + pixels[y1, x1] * (u - x0)
            out[y, x] = top * (1 - (v - y0)) + low * (v - y0)
    return out


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]))
@settings(max_examples=50, deadline=None)
def test_resizing_is_bilinear_within_rounding(height, width, new_height, new_width, channels):
    pixels = np.random.default_rng(height * 10 + width).integers(0, 256, (height, width, channels)).astype(np.uint8)
    got = resized(pixels, new_height, new_width)
    assert got.shape == (new_height, new_width, channels)
    assert np.abs(got - bilinear(pixels.astype(float), new_height, new_width)).max() <= 1


def test_unreadable_images_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read image .*none\.png"):
        read_image(tmp_path / "none.png")
    whole = png(RANDOM.integers(0, 255, (40, 40, 3)).astype(np.uint8))
    for name, content in (("cut.png", whole[: len(whole) // 2]), ("text.png", b"hello"), ("empty.png", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}: cannot be decoded.*truncated"):
            read_image(tmp_path / name)
