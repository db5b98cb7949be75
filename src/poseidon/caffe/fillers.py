"""Initial values of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from poseidon.caffe import device
from poseidon.caffe.blob import Shape
from poseidon.caffe.schema import FillerParameter
from poseidon.errors import ConfigError, unknown_name


def fill(shape: Shape, filler: FillerParameter, owner: str = "filler") -> torch.Tensor:
    """Return a new tensor filled by a FillerParameter; ``owner`` is named in errors."""
    make = _FILLERS.get(filler.type)
    if make is None:
        raise unknown_name(f"filler type of {owner}", filler.type, list(_FILLERS))
    if filler.sparse != -1 and (filler.type != "gaussian" or filler.sparse < -1):
        raise ConfigError(f"{owner}: sparse {filler.sparse} works only with the gaussian filler and values >= 0")
    try:
        # Random numbers always come from the CPU, so a seed gives the same net on every device.
        return make(shape, filler).to(device.active())
    except ConfigError as error:
        raise ConfigError(f"{owner}: {error}") from None


def _new(shape: Shape) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32)


def _constant(shape: Shape, filler: FillerParameter) -> torch.Tensor:
    return _new(shape).fill_(filler.value)


def _uniform(shape: Shape, filler: FillerParameter) -> torch.Tensor:
    return _new(shape).uniform_(filler.min, filler.max)


def _gaussian(shape: Shape, filler: FillerParameter) -> torch.Tensor:
    values = _new(shape).normal_(filler.mean, filler.std)
    if filler.sparse >= 0:
        if not shape or filler.sparse > shape[0]:
            raise ConfigError(f"sparse {filler.sparse} exceeds the first dimension of shape {shape}")
        values *= torch.bernoulli(torch.full(shape, filler.sparse / shape[0]))
    return values


def _positive_unitball(shape: Shape, _filler: FillerParameter) -> torch.Tensor:
    rows = _new(shape).uniform_(0, 1).reshape(shape[0] if shape else 1, -1)
    return (rows / rows.sum(1, keepdim=True)).reshape(shape)


def _xavier(shape: Shape, filler: FillerParameter) -> torch.Tensor:
    limit = math.sqrt(3.0 / _fan(shape, filler))
    return _new(shape).uniform_(-limit, limit)


def _msra(shape: Shape, filler: FillerParameter) -> torch.Tensor:
    return _new(shape).normal_(0, math.sqrt(2.0 / _fan(shape, filler)))


def _bilinear(shape: Shape, _filler: FillerParameter) -> torch.Tensor:
    if len(shape) != 4 or shape[2] != shape[3]:
        raise ConfigError(f"the bilinear filler needs a 4-axes blob with square filters, not {shape}")
    factor = math.ceil(shape[3] / 2)
    centre = (shape[3] - 1) / (2.0 * factor)
    weights = 1 - (torch.arange(shape[3]) / factor - centre).abs()
    return (weights[:, None] * weights).expand(shape).contiguous()


def _fan(shape: Shape, filler: FillerParameter) -> float:
    """Return the number of inputs, outputs or their mean, by ``variance_norm``."""
    count = math.prod(shape)
    fan_in = count // shape[0]
    fan_out = count // shape[1] if len(shape) > 1 else count
    if filler.variance_norm == FillerParameter.FAN_OUT:
        return fan_out
    return (fan_in + fan_out) / 2 if filler.variance_norm == FillerParameter.AVERAGE else fan_in


_FILLERS: dict[str, Callable[[Shape, FillerParameter], torch.Tensor]] = {
    "constant": _constant,
    "uniform": _uniform,
    "gaussian": _gaussian,
    "positive_unitball": _positive_unitball,
    "xavier": _xavier,
    "msra": _msra,
    "bilinear": _bilinear,
}
