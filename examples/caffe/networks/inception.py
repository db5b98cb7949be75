"""Inception-V3: images of 299 pixels, many branches, kernels split into rows and columns, one auxiliary head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from networks.blocks import dense, dropout, gaussian, max_pool, mean_pool, norm_relu
from networks.definition import Head
from poseidon.caffe import NetSpec
from poseidon.caffe import layers as L
from poseidon.caffe.net_spec import Top


class _Conv(NamedTuple):
    """A convolution without bias, normalised and rectified; it keeps the size unless it has no padding."""

    outputs: int
    height: int = 1
    width: int = 1
    stride: int = 1
    is_padded: bool = True


_ROW, _COLUMN = (1, 7), (7, 1)


def inception_v3(n: NetSpec) -> list[Head]:
    """Add Inception-V3."""
    top = _chain(n, "stem_a", n.data, [_Conv(32, 3, 3, 2, False), _Conv(32, 3, 3, 1, False), _Conv(64, 3, 3)])
    n["stem_a/pool"] = max_pool(top, 3, 2)
    top = _chain(n, "stem_b", n["stem_a/pool"], [_Conv(80), _Conv(192, 3, 3, 1, False)])
    top = n["stem_b/pool"] = max_pool(top, 3, 2)
    for name, pooled in (("fine_1", 32), ("fine_2", 64), ("fine_3", 64)):
        top = _fine(n, name, top, pooled)
    top = _to_middle(n, top)
    for index, inner in enumerate((128, 160, 160, 192), start=1):
        top = _middle(n, f"middle_{index}", top, inner)
    auxiliary = _auxiliary(n, top)
    top = _to_coarse(n, top)
    for name in ("coarse_1", "coarse_2"):
        top = _coarse(n, name, top)
    n.pool = mean_pool(top, 8, 1)
    n.classifier = dense(dropout(n, "drop", n.pool), 1000, gaussian(0.01))
    return [auxiliary, Head(n.classifier, "main", 1.0)]


def _fine(n: NetSpec, name: str, bottom: Top, pooled: int) -> Top:
    """Add a block at 35 x 35."""
    return _concat(
        n,
        name,
        _chain(n, f"{name}/1x1", bottom, [_Conv(64)]),
        _chain(n, f"{name}/5x5", bottom, [_Conv(48), _Conv(64, 5, 5)]),
        _chain(n, f"{name}/3x3", bottom, [_Conv(64), _Conv(96, 3, 3), _Conv(96, 3, 3)]),
        _pooled(n, name, bottom, pooled),
    )


def _to_middle(n: NetSpec, bottom: Top) -> Top:
    """Add the block that leads from 35 x 35 to 17 x 17."""
    n["to_middle/pool"] = max_pool(bottom, 3, 2)
    return _concat(
        n,
        "to_middle",
        _chain(n, "to_middle/3x3", bottom, [_Conv(384, 3, 3, 2, False)]),
        _chain(n, "to_middle/double", bottom, [_Conv(64), _Conv(96, 3, 3), _Conv(96, 3, 3, 2, False)]),
        n["to_middle/pool"],
    )


def _middle(n: NetSpec, name: str, bottom: Top, inner: int) -> Top:
    """Add a block at 17 x 17 whose 7x7 kernels are split into rows and columns."""
    single = [_Conv(inner), _Conv(inner, *_ROW), _Conv(192, *_COLUMN)]
    double = [
        _Conv(inner),
        _Conv(inner, *_COLUMN),
        _Conv(inner, *_ROW),
        _Conv(inner, *_COLUMN),
        _Conv(192, *_ROW),
    ]
    return _concat(
        n,
        name,
        _chain(n, f"{name}/1x1", bottom, [_Conv(192)]),
        _chain(n, f"{name}/7x7", bottom, single),
        _chain(n, f"{name}/double", bottom, double),
        _pooled(n, name, bottom, 192),
    )


def _to_coarse(n: NetSpec, bottom: Top) -> Top:
    """Add the block that leads from 17 x 17 to 8 x 8."""
    n["to_coarse/pool"] = max_pool(bottom, 3, 2)
    split = [_Conv(192), _Conv(192, *_ROW), _Conv(192, *_COLUMN), _Conv(192, 3, 3, 2, False)]
    return _concat(
        n,
        "to_coarse",
        _chain(n, "to_coarse/3x3", bottom, [_Conv(192), _Conv(320, 3, 3, 2, False)]),
        _chain(n, "to_coarse/7x7", bottom, split),
        n["to_coarse/pool"],
    )


def _coarse(n: NetSpec, name: str, bottom: Top) -> Top:
    """Add a block at 8 x 8 with two branches that fork."""
    wide = _chain(n, f"{name}/3x3", bottom, [_Conv(384)])
    deep = _chain(n, f"{name}/double", bottom, [_Conv(448), _Conv(384, 3, 3)])
    return _concat(
        n,
        name,
        _chain(n, f"{name}/1x1", bottom, [_Conv(320)]),
        _chain(n, f"{name}/3x3_row", wide, [_Conv(384, 1, 3)]),
        _chain(n, f"{name}/3x3_column", wide, [_Conv(384, 3, 1)]),
        _chain(n, f"{name}/double_row", deep, [_Conv(384, 1, 3)]),
        _chain(n, f"{name}/double_column", deep, [_Conv(384, 3, 1)]),
        _pooled(n, name, bottom, 192),
    )


def _auxiliary(n: NetSpec, bottom: Top) -> Head:
    n["auxiliary/pool"] = mean_pool(bottom, 5, 3)
    top = _chain(n, "auxiliary", n["auxiliary/pool"], [_Conv(128), _Conv(768, 5, 5, 1, False)])
    n["auxiliary/classifier"] = dense(top, 1000, gaussian(0.001))
    return Head(n["auxiliary/classifier"], "auxiliary", 0.4, in_use=False)


def _pooled(n: NetSpec, name: str, bottom: Top, outputs: int) -> Top:
    n[f"{name}/pool"] = mean_pool(bottom, 3, 1, pad=1)
    return _chain(n, f"{name}/pooled", n[f"{name}/pool"], [_Conv(outputs)])


def _concat(n: NetSpec, name: str, *branches: Top) -> Top:
    n[f"{name}/output"] = L.Concat(*branches)
    output: Top = n[f"{name}/output"]
    return output


def _chain(n: NetSpec, name: str, bottom: Top, convs: Sequence[_Conv]) -> Top:
    """Add a chain of convolutions, numbered if there are several."""
    top = bottom
    for number, settings in enumerate(convs, start=1):
        own = name if len(convs) == 1 else f"{name}_{number}"
        n[own] = _conv(top, settings)
        top = norm_relu(n, (f"{own}/bn", f"{own}/scale", f"{own}/relu"), n[own])
    return top


def _conv(bottom: Top, settings: _Conv) -> Top:
    height, width = settings.height, settings.width
    top: Top = L.Convolution(
        bottom,
        num_output=settings.outputs,
        kernel_h=height,
        kernel_w=width,
        pad_h=height // 2 if settings.is_padded else 0,
        pad_w=width // 2 if settings.is_padded else 0,
        stride=settings.stride,
        bias_term=False,
        weight_filler={"type": "msra"},
    )
    return top
