from __future__ import annotations

import io
import sys

import cv2
import numpy as np
import pytest
from PIL import Image

from poseidon.caffe.io.images import decode_image, encode_image, opencv, read_image, resized
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


def test_sixteen_bits_are_converted_on_request_only():
    values = (np.arange(12, dtype=np.uint16) * 5000).reshape(3, 4)
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "PNG")
    assert (decode_image(stream.getvalue(), "gray")[:, :, 0] == values >> 8).all()
    with pytest.raises(ConfigError, match=r"deep\.png: has uint16 values, expected 8 bits.*force_color or force_gray"):
        decode_image(stream.getvalue(), "native", "deep.png")  # Caffe ends here too


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


def saved(picture, kind, **options):
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def pictures():
    """One file of each kind that people have."""
    smooth = np.clip(np.cumsum(RANDOM.normal(0, 9, (38, 54, 3)), axis=1) + 128, 0, 255).astype(np.uint8)
    colour = Image.fromarray(smooth)
    clear = Image.fromarray(np.dstack([smooth, RANDOM.integers(0, 256, (38, 54, 1)).astype(np.uint8)]))
    deep = RANDOM.integers(0, 65536, (38, 54)).astype(np.uint16)
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "colour.png": saved(colour, "PNG"),
        "colour.jpg": saved(colour, "JPEG", quality=85),
        "fine.jpg": saved(colour, "JPEG", quality=97, subsampling=0),
        "stepwise.jpg": saved(colour, "JPEG", progressive=True),
        "colour.bmp": saved(colour, "BMP"),
        "colour.tif": saved(colour, "TIFF"),
        "gray.png": saved(colour.convert("L"), "PNG"),
        "gray.jpg": saved(colour.convert("L"), "JPEG"),
        "palette.png": saved(colour.convert("P"), "PNG"),
        "clear palette.png": saved(colour.convert("P"), "PNG", transparency=b"\x00\x80\xff"),
        "bits.png": saved(colour.convert("1"), "PNG"),
        "deep.png": saved(Image.fromarray(deep), "PNG"),
        "clear.png": saved(clear, "PNG"),
        "clear gray.png": saved(clear.convert("LA"), "PNG"),
        "cmyk.jpg": saved(colour.convert("CMYK"), "JPEG"),
        "turned.jpg": saved(colour, "JPEG", exif=turned),
    }


PICTURES = pictures()
SIZES = [(227, 227), (256, 256), (19, 27), (76, 108), (36, 50), (1, 1), (100, 20)]


@pytest.mark.parametrize("name", PICTURES)
def test_pixels_are_those_of_opencv(name, tmp_path):
    file = tmp_path / name
    file.write_bytes(PICTURES[name])
    for mode, flag in (("color", cv2.IMREAD_COLOR), ("gray", cv2.IMREAD_GRAYSCALE), ("native", cv2.IMREAD_UNCHANGED)):
        expected = cv2.imread(str(file), flag)
        if expected.dtype != np.uint8:
            continue
        got = decode_image(file.read_bytes(), mode, name)
        np.testing.assert_array_equal(got.squeeze(), expected.squeeze())
        if mode == "native":
            continue
        for height, width in SIZES:  # exactly half and twice the size are among them
            np.testing.assert_array_equal(
                read_image(file, mode, height, width).squeeze(), cv2.resize(expected, (width, height)).squeeze()
            )


def test_an_exact_half_is_the_mean_of_four():
    pixels = RANDOM.integers(0, 256, (8, 6, 3)).astype(np.uint8)
    mean = (pixels.astype(int).reshape(4, 2, 3, 2, 3).sum(axis=(1, 3)) + 2) // 4
    np.testing.assert_array_equal(resized(pixels, 4, 3), mean)


def test_a_turned_picture_is_turned():
    assert decode_image(PICTURES["turned.jpg"], "color").shape == (54, 38, 3)
    assert decode_image(PICTURES["turned.jpg"], "native").shape == (38, 54, 3)


@pytest.mark.parametrize("name", [name for name in PICTURES if name.endswith("jpg")])
def test_a_jpeg_that_was_cut_is_refused(name):
    """OpenCV would fill in what is missing."""
    whole = PICTURES[name]
    for size in range(2, len(whole) - 1, max(1, len(whole) // 40)):
        with pytest.raises(ConfigError, match="truncated"):
            decode_image(whole[:size])
    np.testing.assert_array_equal(decode_image(whole + b"after the end"), decode_image(whole))


def test_a_cut_jpeg_with_a_preview_is_refused():
    """The preview has an end of its own."""
    exif = b"Exif\0\0" + b"II*\0\x08\0\0\0\0\0\0\0\0\0" + PICTURES["gray.jpg"]
    whole = saved(Image.open(io.BytesIO(PICTURES["colour.png"])), "JPEG", exif=exif)
    assert decode_image(whole).shape == (38, 54, 3)
    for size in range(len(exif), len(whole) - 1, 20):
        with pytest.raises(ConfigError, match="truncated"):
            decode_image(whole[:size])


def test_without_opencv_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    opencv.cache_clear()
    with pytest.raises(ConfigError, match=r"needs 'cv2'.*pip install '\.\[caffe\]'"):
        decode_image(PICTURES["gray.png"])


def test_unreadable_images_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read image .*none\.png"):
        read_image(tmp_path / "none.png")
    whole = png(RANDOM.integers(0, 255, (40, 40, 3)).astype(np.uint8))
    for name, content in (("cut.png", whole[: len(whole) // 2]), ("text.png", b"hello"), ("empty.png", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}: cannot be decoded.*truncated"):
            read_image(tmp_path / name)
