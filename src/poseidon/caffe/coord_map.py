"""How positions in one top of a net spec correspond to positions in another, and the crop that aligns them.

A map says that a spatial coordinate x of one top lies at a * x + b of another, per spatial axis: ``(axis, a, b)``,
where ``axis`` is the axis before the first spatial one, or None where a layer leaves positions alone.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.net_spec import Function, Top
from poseidon.caffe.net_spec import layers as L
from poseidon.errors import ConfigError

Values: TypeAlias = "NDArray[np.float64] | float"
CoordMap: TypeAlias = tuple["int | None", Values, Values]

_IDENTITY: CoordMap = (None, 1.0, 0.0)

PASS_THROUGH_LAYERS = [
    "AbsVal",
    "BNLL",
    "BatchNorm",
    "Bias",
    "Clip",
    "Dropout",
    "ELU",
    "Eltwise",
    "Exp",
    "LRN",
    "Log",
    "MVN",
    "PReLU",
    "Power",
    "ReLU",
    "Scale",
    "Sigmoid",
    "Split",
    "Swish",
    "TanH",
    "Threshold",
]
"""Layer types whose top has the same positions as their bottom."""


class UndefinedMapException(ConfigError):  # noqa: N818 (pycaffe's name)
    """A layer type mixes or drops positions, so no map exists for it."""


class MisalignedError(ConfigError, AssertionError):
    """A crop cannot align two tops (scripts written for pycaffe expect an AssertionError)."""


class AxisMismatchException(ConfigError):  # noqa: N818 (pycaffe's name)
    """Two maps are about different axes."""


def conv_params(fn: Function) -> tuple[int, NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return (axis, stride, extent of the dilated kernel, padding) of a sliding-window layer."""
    settings = fn.params.get("pooling_param" if fn.type_name == "Pooling" else "convolution_param", fn.params)
    uneven = sorted(key for key in settings if key.endswith(("_h", "_w")))
    if uneven:
        raise ConfigError(f"{fn.type_name}: cropping needs kernel_size, stride and pad instead of {', '.join(uneven)}")
    if "kernel_size" not in settings:
        raise ConfigError(f"{fn.type_name}: kernel_size is needed to map coordinates; given: {sorted(settings)}")
    kernel = np.array(settings["kernel_size"], ndmin=1)
    dilation = np.array(settings.get("dilation", 1), ndmin=1)
    return (
        settings.get("axis", 1),
        np.array(settings.get("stride", 1), ndmin=1),
        (kernel - 1) * dilation + 1,
        np.array(settings.get("pad", 0), ndmin=1),
    )


def crop_params(fn: Function) -> tuple[int, NDArray[Any]]:
    """Return (axis, offset) of a Crop layer."""
    settings = fn.params.get("crop_param", fn.params)
    return settings.get("axis", 2), np.array(settings.get("offset", 0), ndmin=1)


def coord_map(fn: Function) -> CoordMap:
    """Return the map from a layer's bottom to its top."""
    if fn.type_name in ("Convolution", "Pooling", "Im2col"):
        axis, stride, extent, pad = conv_params(fn)
        return axis, 1 / stride, (pad - (extent - 1) / 2) / stride
    if fn.type_name == "Deconvolution":
        axis, stride, extent, pad = conv_params(fn)
        return axis, stride, (extent - 1) / 2 - pad
    if fn.type_name in PASS_THROUGH_LAYERS:
        return _IDENTITY
    if fn.type_name == "Crop":
        axis, offset = crop_params(fn)
        # A Crop counts from its first cropped axis, a convolution from the axis before that.
        return axis - 1, 1.0, -offset
    raise UndefinedMapException(f"a layer of type {fn.type_name} has no coordinate map")


def compose(base_map: CoordMap, next_map: CoordMap) -> CoordMap:
    """Return the map that applies ``next_map`` first and ``base_map`` to its result."""
    axis1, a1, b1 = base_map
    axis2, a2, b2 = next_map
    if axis1 is not None and axis2 is not None and axis1 != axis2:
        raise AxisMismatchException(f"cannot compose coordinate maps of axis {axis1} and axis {axis2}")
    return axis2 if axis1 is None else axis1, a1 * a2, a1 * b2 + b1


def inverse(given: CoordMap) -> CoordMap:
    """Return the inverse map."""
    axis, a, b = given
    return axis, 1 / a, -b / a


def coord_map_from_to(top_from: Top, top_to: Top) -> CoordMap:
    """Return the map from one top to another, through their nearest common ancestor."""
    from_maps = dict(_walk_back(top_from))
    for top, coords in _walk_back(top_to):
        if top in from_maps:
            return compose(coords, inverse(from_maps[top]))
    raise RuntimeError("no coordinate map between these tops: no chain of spatial layers connects them")


def _walk_back(top: Top) -> list[tuple[Top, CoordMap]]:
    """Return each ancestor of ``top`` through spatial layers, nearest first, with the map from it to ``top``."""
    found: dict[Top, CoordMap] = {top: _IDENTITY}
    frontier = [top]
    for current in frontier:
        try:
            step = coord_map(current.fn)
        except UndefinedMapException:
            continue
        # The second input of a Crop only sets the size of the result.
        bottoms = current.fn.inputs[:1] if current.fn.type_name == "Crop" else current.fn.inputs
        for bottom in bottoms:
            if bottom not in found:
                found[bottom] = compose(found[current], step)
                frontier.append(bottom)
    return list(found.items())


def crop(top_from: Top, top_to: Top) -> Any:
    """Return a Crop layer that cuts ``top_from`` to the size of ``top_to``, aligned with it."""
    axis, a, b = coord_map_from_to(top_from, top_to)
    shift = np.atleast_1d(np.asarray(b, dtype=float))
    if not np.all(np.asarray(a) == 1):
        raise MisalignedError(f"cannot crop: the scales of the two tops differ by a factor {a}, which must be 1")
    if not np.all(shift <= 0):
        raise MisalignedError(f"cannot crop: the offset {-shift} is negative, so the cut top starts inside the other")
    if not np.all(np.round(shift) == shift):
        raise MisalignedError(f"cannot crop: the offset {-shift} is not a whole number")
    first = 2 if axis is None else axis + 1
    return L.Crop(top_from, top_to, crop_param={"axis": first, "offset": [int(-value) for value in np.round(shift)]})
