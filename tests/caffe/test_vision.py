"""Layers for images: gradients by finite differences, and Caffe's corner cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gradcheck import build_net, check_gradients

import poseidon.caffe as caffe
from poseidon.caffe.schema import LayerParameter
from poseidon.caffe.schema.files import parse_text
from poseidon.errors import ConfigError


def run(layer, *inputs, tops=1, phase=caffe.TRAIN):
    net = build_net(layer, *[values.shape for values in inputs], tops=tops, phase=phase)
    for i, values in enumerate(inputs):
        net.blobs[f"bottom{i}"].data[...] = values
    net.run_forward()
    return net


def distinct(rng, *shape):
    """Values that differ by much more than the step of finite differences."""
    return rng.permutation(np.prod(shape)).reshape(shape) / np.prod(shape) - 0.5


# Convolution and its relatives.

CONVOLUTIONS = {
    "plain": ((2, 3, 6, 5), "num_output: 4 kernel_size: 3"),
    "one_channel": ((3, 1, 7, 6), "num_output: 2 kernel_size: 3 stride: 2"),
    "rectangular": ((2, 2, 7, 6), "num_output: 3 kernel_h: 3 kernel_w: 2 stride_h: 2 stride_w: 1 pad_h: 1 pad_w: 2"),
    "group_dilation": ((2, 4, 7, 7), "num_output: 6 kernel_size: 3 dilation: 2 pad: 2 group: 2"),
    "depthwise": ((2, 4, 5, 5), "num_output: 4 kernel_size: 3 pad: 1 group: 4 bias_term: false"),
    "one_by_one": ((2, 3, 4, 4), "num_output: 5 kernel_size: 1"),
    "one_axis": ((2, 3, 9), "num_output: 4 kernel_size: 3 stride: 2 pad: 1"),
    "three_axes": ((2, 2, 4, 5, 4), "num_output: 2 kernel_size: 2 kernel_size: 3 kernel_size: 2 pad: 0 pad: 1 pad: 1"),
    "four_axes": (
        (2, 2, 4, 3, 4, 3),
        "num_output: 4 kernel_size: 2 stride: 2 stride: 1 stride: 1 stride: 1 pad: 1 group: 2",
    ),
    "four_axes_dilated": (
        (1, 2, 5, 3, 3, 3),
        "num_output: 2 kernel_size: 2 dilation: 2 dilation: 1 dilation: 1 dilation: 2",
    ),
    "no_spatial_axis": ((3, 4), "num_output: 5 kernel_size: 1"),
    "later_axis": ((2, 2, 3, 5, 4), "axis: 2 num_output: 2 kernel_size: 2"),
    "channels_first": ((3, 6, 5), "axis: 0 num_output: 2 kernel_size: 3 force_nd_im2col: true"),
    "negative_axis": ((2, 3, 5, 4), "axis: -3 num_output: 2 kernel_size: 2"),
}


@pytest.mark.parametrize("kind", ["Convolution", "Deconvolution"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_filters(kind, name):
    shape, settings = CONVOLUTIONS[name]
    values = np.random.default_rng(1).normal(size=shape)
    check_gradients(f'type: "{kind}" convolution_param {{ {settings} }}', [values])


@pytest.mark.parametrize("kind", ["Convolution", "Deconvolution"])
def test_gradients_of_filters_with_two_bottoms(kind):
    rng = np.random.default_rng(2)
    settings = "convolution_param { num_output: 2 kernel_size: 3 pad: 1 }"
    check_gradients(f'type: "{kind}" {settings}', [rng.normal(size=(2, 3, 4, 5)) for _ in range(2)], tops=2)


def convolve_slowly(values, weight, stride, pad, dilation):
    """Convolution of any number of axes from its definition."""
    spatial = range(2, values.ndim)
    values = np.pad(values, [(0, 0), (0, 0)] + [(pad, pad)] * len(spatial))
    sizes = [(values.shape[a] - dilation * (weight.shape[a] - 1) - 1) // stride + 1 for a in spatial]
    result = np.zeros((values.shape[0], weight.shape[0], *sizes))
    for place in itertools.product(*[range(size) for size in sizes]):
        window = tuple(
            slice(p * stride, p * stride + dilation * (weight.shape[a] - 1) + 1, dilation)
            for a, p in zip(spatial, place, strict=True)
        )
        part = values[(slice(None), slice(None), *window)].reshape(values.shape[0], -1)
        result[(slice(None), slice(None), *place)] = part @ weight.reshape(weight.shape[0], -1).T
    return result


@pytest.mark.parametrize("axes", [1, 2, 3, 4, 5])
def test_convolution_of_any_number_of_axes(axes):
    rng = np.random.default_rng(axes)
    values = rng.normal(size=(2, 3, *[6, 5, 4, 3, 3][:axes]))
    layer = (
        'type: "Convolution" convolution_param { num_output: 2 kernel_size: 2 stride: 2 pad: 1 dilation: 2 '
        'bias_filler { type: "constant" value: 0.5 } }'
    )
    net = build_net(layer, values.shape)
    weight = net.params["subject"][0].data
    weight[...] = rng.normal(size=weight.shape)
    net.blobs["bottom0"].data[...] = values
    net.run_forward()
    expected = convolve_slowly(values, weight, 2, 1, 2) + 0.5
    np.testing.assert_allclose(net.blobs["top0"].data, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_deconvolution_is_the_transpose_of_convolution(axes):
    rng = np.random.default_rng(axes)
    settings = "kernel_size: 3 stride: 2 pad: 1 group: 2 bias_term: false"
    small, large = (2, 6, *[3, 2, 4, 2][:axes]), (2, 4, *[5, 3, 7, 3][:axes])
    down = build_net(f'type: "Convolution" convolution_param {{ num_output: 6 {settings} }}', large)
    up = build_net(f'type: "Deconvolution" convolution_param {{ num_output: 4 {settings} }}', small)
    assert down.blobs["top0"].shape == small
    assert up.blobs["top0"].shape == large
    weight = rng.normal(size=down.params["subject"][0].shape)
    assert up.params["subject"][0].shape == weight.shape
    a, b = rng.normal(size=large), rng.normal(size=small)
    for net, values in ((down, a), (up, b)):
        net.params["subject"][0].data[...] = weight
        net.blobs["bottom0"].data[...] = values
        net.run_forward()
    assert (down.blobs["top0"].data * b).sum() == pytest.approx((up.blobs["top0"].data * a).sum(), rel=1e-4)


def test_parameter_shapes():
    settings = "num_output: 6 kernel_h: 3 kernel_w: 2 group: 2"
    for kind, expected in (("Convolution", (6, 2, 3, 2)), ("Deconvolution", (4, 3, 3, 2))):
        net = build_net(f'type: "{kind}" convolution_param {{ {settings} }}', (2, 4, 5, 5))
        assert [blob.shape for blob in net.params["subject"]] == [expected, (6,)]


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ("kernel_size: 3 stride: 2 pad: 1", (2, 2, 6, 5)),
        ("kernel_h: 2 kernel_w: 3 pad_h: 1 dilation: 2", (2, 3, 6, 7)),
        ("kernel_size: 2 stride: 2", (2, 2, 5)),
        ("kernel_size: 2 kernel_size: 1 kernel_size: 3 pad: 1", (1, 2, 3, 3, 4)),
        ("kernel_size: 2 axis: 2", (2, 2, 2, 4, 4)),
    ],
)
def test_im2col(settings, shape):
    rng = np.random.default_rng(3)
    values = rng.normal(size=shape)
    layer = f'type: "Im2col" convolution_param {{ {settings} }}'
    check_gradients(layer, [values])
    if "axis" not in settings:
        # With the identity as filters, a convolution yields the same columns.
        columns = run(layer, values).blobs["top0"].data
        net = build_net(
            f'type: "Convolution" convolution_param {{ num_output: {columns.shape[1]} bias_term: false {settings} }}',
            shape,
        )
        weight = net.params["subject"][0].data
        weight[...] = np.eye(columns.shape[1]).reshape(weight.shape)
        net.blobs["bottom0"].data[...] = values
        net.run_forward()
        np.testing.assert_allclose(net.blobs["top0"].data, columns, rtol=1e-6, atol=1e-6)


# Pooling.

POOLINGS = [
    ((2, 3, 6, 5), "kernel_size: 2 stride: 2"),
    ((2, 3, 7, 8), "kernel_size: 3 stride: 2"),
    ((2, 2, 7, 8), "kernel_size: 3 stride: 2 round_mode: FLOOR"),
    ((2, 2, 6, 6), "kernel_size: 3 stride: 2 pad: 1"),
    ((2, 2, 6, 6), "kernel_size: 3 stride: 2 pad: 1 round_mode: FLOOR"),
    ((2, 2, 6, 5), "kernel_size: 3 stride: 1 pad: 2"),
    ((1, 2, 5, 5), "kernel_size: 2 stride: 2 pad: 1"),
    ((2, 2, 7, 5), "kernel_h: 2 kernel_w: 3 stride_h: 1 stride_w: 2 pad_h: 0 pad_w: 1"),
    ((2, 1, 4, 4), "kernel_size: 3 stride: 3"),
    ((2, 2, 2, 5), "kernel_size: 3 stride: 2"),
    ((2, 2, 8, 8), "kernel_size: 2 stride: 3"),
    ((2, 3, 4, 5), "global_pooling: true"),
    ((2, 2, 5, 6), "kernel_size: 3"),
]


def pool_slowly(values, settings, method):
    """Caffe's pooling, from its definition: result and index of the maximum."""
    fields = parse_text(f"pooling_param {{ {settings} }}", LayerParameter).pooling_param
    sizes = values.shape[2:]

    def pair(name, whole):
        has_sides = fields.HasField(f"{name}_h")
        return [getattr(fields, f"{name}_{side}") if has_sides else getattr(fields, whole) for side in "hw"]

    kernel = list(sizes) if fields.global_pooling else pair("kernel", "kernel_size")
    stride, pad = pair("stride", "stride"), pair("pad", "pad")
    rounded = np.floor if fields.round_mode else np.ceil
    counts = [int(rounded((sizes[a] + 2 * pad[a] - kernel[a]) / stride[a])) + 1 for a in (0, 1)]
    if any(pad):
        counts = [counts[a] - ((counts[a] - 1) * stride[a] >= sizes[a] + pad[a]) for a in (0, 1)]
    result, places = np.zeros((*values.shape[:2], *counts)), np.zeros((*values.shape[:2], *counts))
    for n, c, h, w in np.ndindex(result.shape):
        begin = [place * stride[a] - pad[a] for a, place in enumerate((h, w))]
        end = [min(begin[a] + kernel[a], sizes[a] + pad[a]) for a in (0, 1)]
        area = (end[0] - begin[0]) * (end[1] - begin[1])
        rows, columns = [range(max(begin[a], 0), min(end[a], sizes[a])) for a in (0, 1)]
        seen = [(values[n, c, i, j], i * sizes[1] + j) for i in rows for j in columns]
        if method == "AVE":
            result[n, c, h, w] = sum(value for value, _ in seen) / area
        else:
            best = max(seen, key=lambda pair: (pair[0], -pair[1]))
            result[n, c, h, w], places[n, c, h, w] = best
    return result, places


@pytest.mark.parametrize("index", range(len(POOLINGS)))
@pytest.mark.parametrize("method", ["MAX", "AVE"])
def test_pooling(method, index):
    shape, settings = POOLINGS[index]
    rng = np.random.default_rng(index)
    values = distinct(rng, *shape)
    layer = f'type: "Pooling" pooling_param {{ pool: {method} {settings} }}'
    expected, places = pool_slowly(values.astype(np.float32), settings, method)
    net = run(layer, values)
    assert net.blobs["top0"].shape == expected.shape
    np.testing.assert_allclose(net.blobs["top0"].data, expected, rtol=1e-5, atol=1e-6)
    check_gradients(layer, [values])
    if method == "MAX":
        net = run(layer, values, tops=2)
        np.testing.assert_array_equal(net.blobs["top1"].data, places)
        check_gradients(layer, [values], tops=2, score=[0])


@pytest.mark.parametrize("settings", [settings for _, settings in POOLINGS])
def test_equal_maxima_go_to_the_first(settings):
    shape = next(shape for shape, known in POOLINGS if known == settings)
    values = np.random.default_rng(0).integers(0, 2, shape).astype(np.float32)
    net = run(f'type: "Pooling" pooling_param {{ pool: MAX {settings} }}', values, tops=2)
    expected, places = pool_slowly(values, settings, "MAX")
    np.testing.assert_array_equal(net.blobs["top0"].data, expected)
    np.testing.assert_array_equal(net.blobs["top1"].data, places)
    diff = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    net.blobs["top0"].diff[...] = diff
    net.run_backward()
    wanted = np.zeros(shape, np.float32)
    for n, c, h, w in np.ndindex(places.shape):
        wanted[n, c].flat[int(places[n, c, h, w])] += diff[n, c, h, w]
    np.testing.assert_allclose(net.blobs["bottom0"].diff, wanted, rtol=1e-5, atol=1e-6)


def test_window_outside_the_image():
    values = np.arange(1, 26, dtype=np.float32).reshape(1, 1, 5, 5)
    net = run('type: "Pooling" pooling_param { pool: MAX kernel_size: 1 stride: 3 }', values, tops=2)
    lowest = np.finfo(np.float32).min
    np.testing.assert_array_equal(net.blobs["top0"].data[0, 0], [[1, 4, lowest], [16, 19, lowest], [lowest] * 3])
    np.testing.assert_array_equal(net.blobs["top1"].data[0, 0], [[0, 3, -1], [15, 18, -1], [-1] * 3])


def test_stochastic_pooling_draws_in_proportion():
    caffe.set_random_seed(3)
    values = np.tile(np.float32([[1, 2], [0, 5]]), (2000, 1, 1, 1))
    net = run('type: "Pooling" pooling_param { pool: STOCHASTIC kernel_size: 2 }', values)
    drawn, counts = np.unique(net.blobs["top0"].data, return_counts=True)
    assert drawn.tolist() == [1, 2, 5]
    np.testing.assert_allclose(counts / 2000, [1 / 8, 2 / 8, 5 / 8], atol=0.04)


def test_stochastic_pooling_weights_when_testing():
    values = np.zeros((1, 1, 3, 3), np.float32)
    values[0, 0, :2, :2] = [[1, 2], [0, 5]]
    net = run('type: "Pooling" pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }', values, phase=caffe.TEST)
    np.testing.assert_allclose(net.blobs["top0"].data[0, 0], [[30 / 8, 0], [0, 0]])


@pytest.mark.parametrize("phase", [caffe.TRAIN, caffe.TEST])
def test_gradients_of_stochastic_pooling(phase):
    values = np.random.default_rng(4).uniform(0.1, 1, (2, 2, 5, 5))
    layer = 'type: "Pooling" pooling_param { pool: STOCHASTIC kernel_size: 3 stride: 2 }'
    check_gradients(layer, [values], phase=phase, single=None)


def test_global_pooling_follows_the_size():
    net = build_net('type: "Pooling" pooling_param { pool: AVE global_pooling: true }', (2, 3, 4, 5))
    net.blobs["bottom0"].reshape(1, 3, 7, 2)
    net.blobs["bottom0"].data[...] = values = np.random.default_rng(5).normal(size=(1, 3, 7, 2))
    net.run_forward()
    np.testing.assert_allclose(net.blobs["top0"].data, values.mean((2, 3), keepdims=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["MAX", "AVE"])
@pytest.mark.parametrize(("shape", "height"), [((2, 3, 9, 7), 3), ((2, 2, 6, 5), 1), ((1, 2, 8, 8), 4)])
def test_spp(method, shape, height):
    values = distinct(np.random.default_rng(6), *shape)
    layer = f'type: "SPP" spp_param {{ pyramid_height: {height} pool: {method} }}'
    net = run(layer, values)
    places = sum(4**level for level in range(height))
    assert net.blobs["top0"].shape == ((*shape[:2], 1, 1) if height == 1 else (shape[0], shape[1] * places))
    check_gradients(layer, [values])


# Normalisation.


@pytest.mark.parametrize("shape", [(2, 7, 3, 4), (1, 2, 5, 5), (3, 1, 2, 2)])
@pytest.mark.parametrize(
    "settings",
    [
        "local_size: 5 alpha: 0.5 beta: 0.75",
        "local_size: 3 alpha: 2 beta: 0.6 k: 1.5",
        "local_size: 1 alpha: 1",
        "local_size: 3 alpha: 0.8 beta: 0.75 norm_region: WITHIN_CHANNEL",
        "local_size: 5 alpha: 3 beta: 0.4 k: 7 norm_region: WITHIN_CHANNEL",
    ],
)
def test_lrn(settings, shape):
    values = np.random.default_rng(7).normal(size=shape)
    layer = f'type: "LRN" lrn_param {{ {settings} }}'
    check_gradients(layer, [values])
    check_gradients(layer, [values], in_place=True)


def test_lrn_by_its_definition():
    values = np.random.default_rng(8).normal(size=(2, 6, 3, 3))
    top = run('type: "LRN" lrn_param { local_size: 3 alpha: 0.6 beta: 0.75 k: 2 }', values).blobs["top0"].data
    padded = np.pad(values**2, [(0, 0), (1, 1), (0, 0), (0, 0)])
    energy = 2 + 0.2 * (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:])
    np.testing.assert_allclose(top, values * energy**-0.75, rtol=1e-5)


@pytest.mark.parametrize("settings", ["", "across_channels: true", "normalize_variance: false"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 3), (3, 4, 2, 1)])
def test_mvn(settings, shape):
    values = np.random.default_rng(9).normal(size=shape)
    check_gradients(f'type: "MVN" mvn_param {{ {settings} }}', [values])
    check_gradients(f'type: "MVN" mvn_param {{ {settings} }}', [values], in_place=True)


def test_mvn_makes_four_axes():
    net = run('type: "MVN" mvn_param { across_channels: true }', np.float32([[1, 2, 3], [4, 4, 7]]))
    assert net.blobs["top0"].shape == (2, 3, 1, 1)
    np.testing.assert_allclose(net.blobs["top0"].data.mean(1), 0, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 3, 3, 2), (6, 3), (5, 2, 4), (2, 3, 2, 2, 2), (5,)])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_gradients_of_batch_norm(shape, in_place, stored):
    values = np.random.default_rng(10).normal(size=shape)
    settings = f"batch_norm_param {{ eps: 0.01 use_global_stats: {str(stored).lower()} }}"
    check_gradients(f'type: "BatchNorm" {settings}', [values], params=[], in_place=in_place)


def test_batch_norm_of_a_single_value_stores_no_variance():
    net = run('type: "BatchNorm"', np.float32([[3, -2]]))
    mean, variance, weight = [blob.data.tolist() for blob in net.params["subject"]]
    assert (mean, variance, weight) == ([3, -2], [0, 0], [1])


def test_batch_norm_before_training_changes_little():
    values = np.float32([[3, -2], [1, 5]])
    net = run('type: "BatchNorm" batch_norm_param { eps: 0.25 }', values, phase=caffe.TEST)
    np.testing.assert_allclose(net.blobs["top0"].data, values * 2)


def test_batch_norm_statistics_are_not_learned():
    net = build_net('type: "BatchNorm"', (2, 3))
    assert [param.lr_mult for param in net.learnable] == [0, 0, 0]
    with pytest.raises(ConfigError, match=r"'subject' \(BatchNorm\): parameter 1 .* lr_mult must be 0, it is 1"):
        build_net('type: "BatchNorm" param { lr_mult: 0 } param { lr_mult: 1 }', (2, 3))


# Scale, Bias, Crop.


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "settings",
    ["", "bias_term: true", "axis: 0 num_axes: 2 bias_term: true", "axis: 2 num_axes: -1", "num_axes: 0", "axis: -1"],
)
def test_gradients_of_scale(settings, in_place):
    values = np.random.default_rng(12).normal(size=(2, 3, 4, 2))
    check_gradients(f'type: "Scale" scale_param {{ {settings} }}', [values], in_place=in_place)
    if "bias_term" not in settings:
        check_gradients(f'type: "Bias" bias_param {{ {settings} }}', [values], in_place=in_place)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [((3,), ""), ((3, 4), "bias_term: true"), ((), "bias_term: true"), ((2, 3, 4, 2), "axis: 0"), ((4, 2), "axis: -2")],
)
def test_gradients_of_scale_by_a_bottom(shape, settings):
    rng = np.random.default_rng(13)
    bottoms = [rng.normal(size=(2, 3, 4, 2)), rng.normal(size=shape)]
    check_gradients(f'type: "Scale" scale_param {{ {settings} }}', bottoms)
    check_gradients(f'type: "Scale" scale_param {{ {settings} }}', bottoms, in_place=True)
    if "bias_term" not in settings:
        check_gradients(f'type: "Bias" bias_param {{ {settings} }}', bottoms)


def test_scale_starts_as_identity():
    values = np.random.default_rng(14).normal(size=(2, 3)).astype(np.float32)
    np.testing.assert_array_equal(
        run('type: "Scale" scale_param { bias_term: true }', values).blobs["top0"].data, values
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("axis: 2 offset: 1", np.s_[:, :, 1:4, 1:3]),
        ("axis: 1 offset: 1 offset: 2 offset: 0", np.s_[:, 1:2, 2:5, 0:2]),
        ("axis: -1", np.s_[:, :, :, 0:2]),
        ("axis: 0", np.s_[0:2, 0:1, 0:3, 0:2]),
    ],
)
def test_crop(settings, expected):
    values = np.random.default_rng(15).normal(size=(2, 3, 5, 4)).astype(np.float32)
    reference = np.zeros((2, 1, 3, 2), np.float32)
    layer = f'type: "Crop" crop_param {{ {settings} }}'
    np.testing.assert_array_equal(run(layer, values, reference).blobs["top0"].data, values[expected])
    check_gradients(layer, [values, reference], wrt=[0])


# Values and gradients may come in either memory layout.


@pytest.mark.parametrize(
    "layer",
    [
        '"Convolution" convolution_param { num_output: 2 kernel_size: 3 weight_filler { type: "xavier" } }',
        '"Deconvolution" convolution_param { num_output: 2 kernel_size: 2 weight_filler { type: "xavier" } }',
        '"Pooling" pooling_param { pool: MAX kernel_size: 3 stride: 2 }',
        '"Pooling" pooling_param { pool: AVE kernel_size: 3 stride: 2 pad: 2 }',
        '"SPP" spp_param { pyramid_height: 2 }',
        '"LRN" lrn_param { local_size: 3 alpha: 1 }',
        '"LRN" lrn_param { local_size: 3 alpha: 1 norm_region: WITHIN_CHANNEL }',
        '"MVN"',
        '"BatchNorm"',
        '"Scale" scale_param { bias_term: true }',
        '"Im2col" convolution_param { kernel_size: 2 }',
    ],
)
def test_memory_layout_does_not_matter(layer):
    caffe.set_random_seed(1)
    net = build_net(f"type: {layer}", (3, 4, 6, 5))
    rng = np.random.default_rng(11)
    values, diff = [
        torch.from_numpy(rng.normal(size=net.blobs[name].shape).astype(np.float32)) for name in ("bottom0", "top0")
    ]

    def results(value_layout, diff_layout):
        net.blobs["bottom0"].put_data(values.contiguous(memory_format=value_layout))
        net.run_forward()
        top = net.blobs["top0"].data_tensor.clone()
        spatial_layout = diff_layout if diff.dim() == 4 else torch.contiguous_format
        net.blobs["top0"].put_diff(diff.contiguous(memory_format=spatial_layout))
        net.clear_param_diffs()
        net.run_backward()
        return [top, net.blobs["bottom0"].diff_tensor, *[blob.diff_tensor.clone() for blob in net.layers[-1].blobs]]

    outside, inside = torch.contiguous_format, torch.channels_last
    expected = results(outside, outside)
    for layouts in ((outside, inside), (inside, outside), (inside, inside)):
        torch.testing.assert_close(results(*layouts), expected)
