"""Images, Transformer, messages, Classifier and Detector."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from poseidon.caffe import TEST, Classifier, Detector, Net, io
from poseidon.caffe.proto import caffe_pb2
from poseidon.errors import ConfigError

RGB = np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8)


def saved(tmp_path, pixels, mode=None, name="im.png"):
    path = tmp_path / name
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path)
    return path


def test_images_come_as_rgb_fractions(tmp_path):
    image = io.load_image(saved(tmp_path, RGB))
    assert image.dtype == np.float32
    np.testing.assert_allclose(image, RGB / 255, rtol=1e-6)
    gray = io.load_image(saved(tmp_path, RGB), color=False)
    assert gray.shape == (6, 4, 1)
    np.testing.assert_allclose(gray[..., 0], RGB / 255 @ [0.2125, 0.7154, 0.0721], rtol=1e-5)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "I;16"])
def test_other_kinds_of_image_become_three_channels_or_one(tmp_path, mode):
    path = saved(tmp_path, (RGB[:, :, 0].astype(np.uint16) * 257)) if mode == "I;16" else saved(tmp_path, RGB, mode)
    color, gray = io.load_image(path), io.load_image(path, color=False)
    assert (color.shape, gray.shape) == ((6, 4, 3), (6, 4, 1))
    assert 0 <= color.min() <= color.max() <= 1
    assert color.max() > 0.5
    if mode == "I;16":
        np.testing.assert_allclose(gray[..., 0], RGB[:, :, 0] / 255, rtol=1e-6)


def test_an_unreadable_image_is_named(tmp_path):
    (tmp_path / "no.jpg").write_text("text")
    for name in ("no.jpg", "missing.jpg"):
        with pytest.raises(ConfigError, match=name):
            io.load_image(tmp_path / name)


def test_resizing_keeps_flat_images_flat_and_the_range_of_others():
    flat = np.full((5, 5, 3), 7.0)
    assert (io.resize_image(flat, (9, 2)) == 7).all()
    image = np.random.default_rng(1).uniform(-3, 4, (8, 8, 3))
    np.testing.assert_allclose(io.resize_image(image, (8, 8)), image, rtol=1e-5, atol=1e-6)
    small = io.resize_image(image, (3, 5))
    assert small.shape == (3, 5, 3)
    assert image.min() <= small.min() <= small.max() <= image.max()


def test_ten_crops_are_corners_centre_and_their_mirror_images():
    image = np.arange(5 * 6, dtype=np.float32).reshape(5, 6, 1)
    crops = io.oversample([image], (3, 4))
    assert [int(crop[0, 0, 0]) for crop in crops[:5]] == [0, 2, 12, 14, 7]
    np.testing.assert_array_equal(crops[5:], crops[:5, :, ::-1])
    with pytest.raises(ConfigError, match=r"7 x 4 do not fit in 5 x 6"):
        io.oversample([image], (7, 4))


def test_messages_of_either_precision_and_shape_are_read():
    old = caffe_pb2.BlobProto(num=1, channels=2, height=1, width=2, data=[1, 2, 3, 4], diff=[5, 6, 7, 8])
    assert io.blobproto_to_array(old).shape == (1, 2, 1, 2)
    assert io.blobproto_to_array(old, return_diff=True).sum() == 26
    double = caffe_pb2.BlobProto(double_data=[0.1, 0.2])
    double.shape.dim.append(2)
    np.testing.assert_array_equal(io.blobproto_to_array(double), [0.1, 0.2])
    both = io.array_to_blobproto(np.ones((2, 2)), np.zeros((2, 2)))
    assert (len(both.data), len(both.diff)) == (4, 4)
    double.shape.dim.append(3)
    with pytest.raises(ConfigError, match=r"\(2, 3\) holds 2 values"):
        io.blobproto_to_array(double)


def test_messages_that_hold_something_else_are_refused():
    with pytest.raises(ValueError, match=r"\(3, 4\)"):
        io.array_to_datum(np.zeros((3, 4)))
    with pytest.raises(ConfigError, match="encoded"):
        io.datum_to_array(caffe_pb2.Datum(channels=3, height=1, width=1, data=b"jpg", encoded=True))
    with pytest.raises(ConfigError, match=r"\(3, 1, 1\) holds 2"):
        io.datum_to_array(caffe_pb2.Datum(channels=3, height=1, width=1, data=b"ab"))


def test_a_transformer_undoes_what_it_does_and_leaves_its_input_alone():
    transformer = io.Transformer({"data": (1, 3, 6, 4)})
    transformer.set_transpose("data", (2, 0, 1))
    transformer.set_channel_swap("data", (1, 2, 0))
    transformer.set_raw_scale("data", 255)
    transformer.set_mean("data", np.array([1.0, 2.0, 3.0]))
    transformer.set_input_scale("data", 0.25)
    image = (RGB / 255).astype(np.float32)
    before = image.copy()
    done = transformer.preprocess("data", image)
    np.testing.assert_array_equal(image, before)
    np.testing.assert_allclose(done[0], (RGB[:, :, 1] - 1.0) / 4, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(transformer.deprocess("data", done), image, rtol=1e-4, atol=1e-6)


def test_a_mean_image_is_brought_to_the_inputs_size():
    transformer = io.Transformer({"data": (1, 1, 4, 4)})
    transformer.set_mean("data", np.linspace(0, 1, 64).reshape(8, 8))
    assert transformer.mean["data"].shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("call", "value", "message"),
    [
        ("transpose", (1, 0), r"\(1, 0\).*\(1, 3, 6, 4\)"),
        ("channel_swap", (1, 0), r"\(1, 0\).*\(1, 3, 6, 4\)"),
        ("mean", np.zeros(2), "2 values"),
        ("mean", np.zeros((2, 6, 4)), r"\(2, 6, 4\)"),
    ],
)
def test_settings_that_do_not_fit_the_input_are_refused(call, value, message):
    transformer = io.Transformer({"data": (1, 3, 6, 4)})
    with pytest.raises(ConfigError, match=message):
        getattr(transformer, f"set_{call}")("data", value)
    with pytest.raises(ConfigError, match="'image' is not one of the net's inputs: data"):
        transformer.set_raw_scale("image", 1)


@pytest.fixture
def model(tmp_path):
    """A net whose two scores are the means of its input's first and last channel."""
    definition, weights = tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    definition.write_text(
        'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 dim: 4 dim: 4 } } }\n'
        'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }'
    )
    net = Net(str(definition), TEST)
    values = np.zeros((2, 3, 16))
    values[0, 0] = values[1, 2] = 1 / 16
    net.params["ip"][0].data[...] = values.reshape(2, 48)
    net.save(weights)
    return str(definition), str(weights)


def test_a_classifier_averages_over_crops(model):
    ramp = np.broadcast_to(np.arange(8.0)[None, :, None], (8, 8, 3)).copy()
    classifier = Classifier(*model, image_dims=(8, 8), raw_scale=2, channel_swap=(2, 1, 0), mean=np.array([0, 0, 3.0]))
    centre = classifier.predict([ramp, ramp], oversample=False)
    np.testing.assert_allclose(centre, [[7, 4]] * 2, rtol=1e-5)
    averaged = classifier.predict([ramp] * 3)
    assert averaged.shape == (3, 2)
    np.testing.assert_allclose(averaged[0], [7, 4], rtol=1e-5)
    shifted = classifier.predict([ramp[:, ::-1]], oversample=False)
    np.testing.assert_allclose(shifted, [[7, 4]], rtol=1e-5)


def test_a_detector_scores_windows(model, tmp_path):
    pixels = np.zeros((4, 8, 3), np.uint8)
    pixels[:, 4:, 0] = 255
    path = str(saved(tmp_path, pixels, name="windows.png"))
    found = Detector(*model).detect_windows([(path, [(0, 0, 4, 4), (0, 4, 4, 8)])])
    assert [(item["filename"], item["window"]) for item in found] == [(path, (0, 0, 4, 4)), (path, (0, 4, 4, 8))]
    np.testing.assert_allclose([item["prediction"] for item in found], [[0, 0], [1, 0]], atol=1e-6)
    assert Detector(*model).detect_windows([]) == []


def test_context_beyond_the_image_is_the_mean(model, tmp_path):
    detector = Detector(*model, context_pad=1, mean=np.array([30.0, 0, 0]), raw_scale=255, channel_swap=(2, 1, 0))
    image = np.ones((8, 8, 3), np.float32)
    inside = detector.crop(image, np.array([2, 2, 5, 5]))
    assert inside.shape == (4, 4, 3)
    np.testing.assert_allclose(inside, 1)
    corner = detector.crop(image, np.array([0, 0, 3, 3]))
    np.testing.assert_allclose(corner[0, 0], [0, 0, 30 / 255], rtol=1e-5)
    np.testing.assert_allclose(corner[-1, -1], 1)
    with pytest.raises(ConfigError, match="outside the image"):
        detector.crop(image, np.array([50, 50, 60, 60]))
    with pytest.raises(ConfigError, match=r"selective_search.*detect_windows"):
        detector.detect_selective_search(["a.png"])
