"""Layers for images: settings and shapes that must be refused, with a message that names the layer."""

from __future__ import annotations

import pytest
from gradcheck import build_net

from poseidon.errors import ConfigError


@pytest.mark.parametrize(
    ("layer", "shapes", "message"),
    [
        ('"Convolution" convolution_param { kernel_size: 3 }', [(1, 2, 5, 5)], "num_output must be given"),
        ('"Convolution" convolution_param { num_output: 1 }', [(1, 2, 5, 5)], "kernel_size must be given once"),
        (
            '"Convolution" convolution_param { num_output: 1 kernel_size: 3 kernel_h: 3 kernel_w: 3 }',
            [(1, 2, 5, 5)],
            "kernel_size or kernel_h and kernel_w, not both",
        ),
        (
            '"Convolution" convolution_param { num_output: 1 kernel_h: 3 }',
            [(1, 2, 5, 5)],
            "kernel_size must be positive",
        ),
        (
            '"Convolution" convolution_param { num_output: 1 kernel_h: 3 kernel_w: 3 }',
            [(1, 2, 5)],
            "need 2 spatial axes, the bottom has 1",
        ),
        (
            '"Convolution" convolution_param { num_output: 4 kernel_size: 3 group: 2 }',
            [(1, 3, 5, 5)],
            r"group 2 must divide the 3 channels of bottom 'bottom0' \(shape \(1, 3, 5, 5\)\)",
        ),
        (
            '"Convolution" convolution_param { num_output: 1 kernel_size: 7 }',
            [(1, 1, 5, 5)],
            "do not fit bottom 'bottom0'",
        ),
        (
            '"Im2col" convolution_param { kernel_size: 7 }',
            [(1, 1, 5, 5)],
            r"kernel \(7, 7\) does not fit bottom 'bottom0'",
        ),
        ('"Im2col" convolution_param { kernel_size: 7 axis: 3 }', [(1, 1, 5, 5)], "has no spatial axis"),
        ('"Pooling" pooling_param { }', [(1, 1, 5, 5)], "needs kernel_size, or both kernel_h and kernel_w"),
        ('"Pooling" pooling_param { kernel_h: 2 }', [(1, 1, 5, 5)], "needs kernel_size, or both kernel_h and kernel_w"),
        (
            '"Pooling" pooling_param { kernel_size: 2 pad: 2 }',
            [(1, 1, 5, 5)],
            "pad 2 must be smaller than the kernel, 2",
        ),
        (
            '"Pooling" pooling_param { kernel_size: 2 stride: 1 stride_h: 1 stride_w: 2 }',
            [(1, 1, 5, 5)],
            "needs stride, or both stride_h and stride_w",
        ),
        ('"Pooling" pooling_param { kernel_size: 2 global_pooling: true }', [(1, 1, 5, 5)], "takes no kernel size"),
        ('"Pooling" pooling_param { stride: 2 global_pooling: true }', [(1, 1, 5, 5)], "needs pad 0 and stride 1"),
        ('"Pooling" pooling_param { kernel_size: 2 }', [(1, 1, 5)], r"must have 4 axes, its shape is \(1, 1, 5\)"),
        ('"Pooling" pooling_param { kernel_size: 9 }', [(1, 1, 5, 5)], r"kernel \(9, 9\) does not fit"),
        ('"Pooling" pooling_param { pool: STOCHASTIC kernel_size: 2 pad: 1 }', [(1, 1, 5, 5)], "can be padded"),
        ('"SPP" spp_param { }', [(1, 1, 5, 5)], "pyramid_height must be given"),
        ('"SPP" spp_param { pyramid_height: 4 }', [(1, 1, 5, 5)], "level 2 cannot cut 5 into 4"),
        ('"LRN" lrn_param { local_size: 4 }', [(1, 1, 5, 5)], "local_size must be odd, it is 4"),
        ('"LRN"', [(1, 1, 5)], "must have 4 axes"),
        ('"MVN"', [(1, 1, 1, 1, 5)], "must have at most 4 axes"),
        ('"Scale" scale_param { num_axes: 4 }', [(1, 2, 3)], "num_axes 4 from axis 1 does not fit bottom 'bottom0'"),
        (
            '"Scale"',
            [(1, 2, 3), (3,)],
            r"an operand of shape \(3,\) does not match bottom 'bottom0' of shape \(1, 2, 3\)",
        ),
        (
            '"Crop" crop_param { offset: 3 }',
            [(1, 1, 5, 5), (1, 1, 3, 3)],
            "on axis 2, 3 values .* from offset 3 exceed",
        ),
        ('"Crop" crop_param { axis: 1 offset: 3 offset: 1 }', [(1, 1, 5, 5), (1, 1, 3, 3)], "or 3 times; got 2"),
    ],
)
def test_wrong_settings_are_refused(layer, shapes, message):
    kind = layer.split('"')[1]
    with pytest.raises(ConfigError, match=rf"layer 'subject' \({kind}\): .*{message}"):
        build_net(f"type: {layer}", *shapes)


def test_second_top_of_average_pooling_is_refused():
    with pytest.raises(ConfigError, match="only MAX pooling has a second top"):
        build_net('type: "Pooling" pooling_param { pool: AVE kernel_size: 2 }', (1, 1, 4, 4), tops=2)


def test_bottoms_of_different_shapes_are_refused():
    with pytest.raises(
        ConfigError, match=r"bottom 'bottom1' has shape \(1, 2, 4, 4\), but bottom 'bottom0' has \(1, 2, 5, 5\)"
    ):
        build_net(
            'type: "Convolution" convolution_param { num_output: 1 kernel_size: 3 }', (1, 2, 5, 5), (1, 2, 4, 4), tops=2
        )


def test_new_number_of_channels_is_refused():
    net = build_net('type: "Convolution" convolution_param { num_output: 1 kernel_size: 3 }', (1, 2, 5, 5))
    net.blobs["bottom0"].reshape(1, 3, 5, 5)
    with pytest.raises(
        ConfigError, match=r"has shape \(1, 3, 5, 5\); the filters of shape \(1, 2, 3, 3\) need 2 channels"
    ):
        net.run_forward()
