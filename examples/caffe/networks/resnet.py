"""ResNet with 152 layers: bottlenecks whose stride sits in their first convolution, names as in the released model."""

from __future__ import annotations

from networks.blocks import dense, max_pool, mean_pool, norm_relu, relu
from networks.definition import Head
from poseidon.caffe import NetSpec
from poseidon.caffe import layers as L
from poseidon.caffe.net_spec import Top

_STAGES = ((64, 3), (128, 8), (256, 36), (512, 3))
"""Inner channels and number of bottlenecks; a bottleneck's output has four times its inner channels."""


def resnet152(n: NetSpec) -> list[Head]:
    """Add ResNet-152."""
    n.conv1 = _conv(n.data, 64, 7, stride=2, pad=3)
    n.pool1 = max_pool(norm_relu(n, ("bn_conv1", "scale_conv1", "conv1_relu"), n.conv1), 3, 2)
    top = n.pool1
    for stage, (inner, depth) in enumerate(_STAGES, start=2):
        for index in range(depth):
            name = f"{stage}{_suffix(index, depth)}"
            stride = 2 if index == 0 and stage > 2 else 1
            top = _bottleneck(n, name, top, inner, stride, is_first=index == 0)
    n.pool5 = mean_pool(top, 7, 1)
    n.fc1000 = dense(n.pool5, 1000, {"type": "msra"})
    return [Head(n.fc1000)]


def _suffix(index: int, depth: int) -> str:
    """Return a, b, c in short stages; a, b1, b2 ... in long ones."""
    if depth <= 3:
        return "abc"[index]
    return "a" if index == 0 else f"b{index}"


def _bottleneck(n: NetSpec, name: str, bottom: Top, inner: int, stride: int, is_first: bool) -> Top:
    shortcut = bottom
    if is_first:
        shortcut = _branch(n, f"{name}_branch1", bottom, inner * 4, 1, stride=stride, has_relu=False)
    top = _branch(n, f"{name}_branch2a", bottom, inner, 1, stride=stride)
    top = _branch(n, f"{name}_branch2b", top, inner, 3, pad=1)
    top = _branch(n, f"{name}_branch2c", top, inner * 4, 1, has_relu=False)
    n[f"res{name}"] = L.Eltwise(shortcut, top)
    return relu(n, f"res{name}_relu", n[f"res{name}"])


def _branch(
    n: NetSpec,
    name: str,
    bottom: Top,
    outputs: int,
    kernel: int,
    *,
    stride: int = 1,
    pad: int = 0,
    has_relu: bool = True,
) -> Top:
    n[f"res{name}"] = _conv(bottom, outputs, kernel, stride=stride, pad=pad)
    activation = f"res{name}_relu" if has_relu else None
    return norm_relu(n, (f"bn{name}", f"scale{name}", activation), n[f"res{name}"])


def _conv(bottom: Top, outputs: int, kernel: int, *, stride: int = 1, pad: int = 0) -> Top:
    top: Top = L.Convolution(
        bottom,
        num_output=outputs,
        kernel_size=kernel,
        stride=stride,
        pad=pad,
        bias_term=False,
        weight_filler={"type": "msra"},
    )
    return top
