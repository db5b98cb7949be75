"""GoogLeNet: nine blocks of four branches, and two heads that only help training."""

from __future__ import annotations

from typing import NamedTuple

from networks.blocks import conv, dense, dropout, max_pool, mean_pool, relu
from networks.definition import Head
from poseidon.caffe import NetSpec
from poseidon.caffe import layers as L
from poseidon.caffe.net_spec import Top

_XAVIER = {"type": "xavier"}
_BIAS = 0.2


class _Block(NamedTuple):
    """Channels of a block's branches; a reduction comes before each large kernel."""

    name: str
    plain: int
    reduce3: int
    conv3: int
    reduce5: int
    conv5: int
    pooled: int


_STAGES = (
    (_Block("3a", 64, 96, 128, 16, 32, 32), _Block("3b", 128, 128, 192, 32, 96, 64)),
    (
        _Block("4a", 192, 96, 208, 16, 48, 64),
        _Block("4b", 160, 112, 224, 24, 64, 64),
        _Block("4c", 128, 128, 256, 24, 64, 64),
        _Block("4d", 112, 144, 288, 32, 64, 64),
        _Block("4e", 256, 160, 320, 32, 128, 128),
    ),
    (_Block("5a", 256, 160, 320, 32, 128, 128), _Block("5b", 384, 192, 384, 48, 128, 128)),
)
_HEADS_AFTER = {"4a": "loss1", "4d": "loss2"}


def googlenet(n: NetSpec) -> list[Head]:
    """Add GoogLeNet with its auxiliary heads, weighted by 0.3."""
    heads: list[Head] = []
    top = _stem(n)
    for number, stage in enumerate(_STAGES, start=3):
        for block in stage:
            top = _add_block(n, block, top)
            if block.name in _HEADS_AFTER:
                heads.append(_auxiliary(n, _HEADS_AFTER[block.name], top))
        if number < 5:
            top = n[f"pool{number}/3x3_s2"] = max_pool(top, 3, 2)
    n["pool5/7x7_s1"] = mean_pool(top, 7, 1)
    last = dropout(n, "pool5/drop_7x7_s1", n["pool5/7x7_s1"], 0.4)
    n["loss3/classifier"] = dense(last, 1000, _XAVIER)
    return [*heads, Head(n["loss3/classifier"], "loss3", 1.0)]


def _stem(n: NetSpec) -> Top:
    top = _conv_relu(n, "conv1/7x7_s2", n.data, 64, 7, stride=2, pad=3)
    n["pool1/3x3_s2"] = max_pool(top, 3, 2)
    n["pool1/norm1"] = L.LRN(n["pool1/3x3_s2"], local_size=5, alpha=1e-4, beta=0.75)
    top = _conv_relu(n, "conv2/3x3_reduce", n["pool1/norm1"], 64, 1)
    top = _conv_relu(n, "conv2/3x3", top, 192, 3, pad=1)
    n["conv2/norm2"] = L.LRN(top, local_size=5, alpha=1e-4, beta=0.75)
    n["pool2/3x3_s2"] = max_pool(n["conv2/norm2"], 3, 2)
    pooled: Top = n["pool2/3x3_s2"]
    return pooled


def _add_block(n: NetSpec, block: _Block, bottom: Top) -> Top:
    name = f"inception_{block.name}"
    plain = _conv_relu(n, f"{name}/1x1", bottom, block.plain, 1)
    reduced3 = _conv_relu(n, f"{name}/3x3_reduce", bottom, block.reduce3, 1)
    conv3 = _conv_relu(n, f"{name}/3x3", reduced3, block.conv3, 3, pad=1)
    reduced5 = _conv_relu(n, f"{name}/5x5_reduce", bottom, block.reduce5, 1)
    conv5 = _conv_relu(n, f"{name}/5x5", reduced5, block.conv5, 5, pad=2)
    n[f"{name}/pool"] = max_pool(bottom, 3, 1, pad=1)
    pooled = _conv_relu(n, f"{name}/pool_proj", n[f"{name}/pool"], block.pooled, 1)
    n[f"{name}/output"] = L.Concat(plain, conv3, conv5, pooled)
    output: Top = n[f"{name}/output"]
    return output


def _auxiliary(n: NetSpec, name: str, bottom: Top) -> Head:
    n[f"{name}/ave_pool"] = mean_pool(bottom, 5, 3)
    top = _conv_relu(n, f"{name}/conv", n[f"{name}/ave_pool"], 128, 1)
    n[f"{name}/fc"] = dense(top, 1024, _XAVIER, _BIAS)
    top = dropout(n, f"{name}/drop_fc", relu(n, f"{name}/relu_fc", n[f"{name}/fc"]), 0.7)
    n[f"{name}/classifier"] = dense(top, 1000, _XAVIER)
    return Head(n[f"{name}/classifier"], name, 0.3, in_use=False)


def _conv_relu(n: NetSpec, name: str, bottom: Top, outputs: int, kernel: int, **settings: int) -> Top:
    n[name] = conv(bottom, outputs, kernel, _XAVIER, _BIAS, **settings)
    group, _, part = name.rpartition("/")
    return relu(n, f"{group}/relu_{part}", n[name])
