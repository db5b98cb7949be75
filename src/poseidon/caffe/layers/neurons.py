"""Layers that work element by element."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from poseidon.caffe.layers.base import Blobs, Layer, Tensors
from poseidon.caffe.layers.registry import register


class Neuron(Layer):
    """Base of layers with one bottom and one top of the same shape; may work in place."""

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        return (self.activate(inputs[0]),)

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        """Return the top's values."""
        raise TypeError(f"layer type {self.type} defines no activation")


@register("ReLU")
class ReLU(Neuron):
    """max(x, 0), or with a slope below zero."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self._slope: float = self.param.relu_param.negative_slope

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(values, self._slope) if self._slope else torch.relu(values)


@register("Sigmoid")
class Sigmoid(Neuron):
    """1 / (1 + exp(-x))."""

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(values)


@register("TanH")
class TanH(Neuron):
    """The hyperbolic tangent."""

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(values)


@register("AbsVal")
class AbsVal(Neuron):
    """The absolute value; its gradient at zero is zero."""

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs()


@register("BNLL")
class BNLL(Neuron):
    """log(1 + exp(x)), linear where exp would overflow."""

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        return F.softplus(values, threshold=50)


@register("Power")
class Power(Neuron):
    """(shift + scale * x) ** power."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.power_param
        self._power, self._scale, self._shift = settings.power, settings.scale, settings.shift

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        if self._power * self._scale == 0:
            # Constant, with a zero gradient even where 0 ** 0 or infinities would occur.
            return torch.full_like(values, 1.0 if self._power == 0 else self._shift**self._power)
        if self._scale != 1:
            values = values * self._scale
        if self._shift:
            values = values + self._shift
        return values if self._power == 1 else values.pow(self._power)


@register("Exp")
class Exp(Neuron):
    """base ** (shift + scale * x); base -1 means e."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.exp_param
        if settings.base != -1 and settings.base <= 0:
            raise self.error(f"exp_param.base must be positive, or -1 for e; it is {settings.base}")
        log_base = 1.0 if settings.base == -1 else math.log(settings.base)
        self._inner_scale = settings.scale * log_base
        self._outer_scale = math.exp(settings.shift * log_base)

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        result = (values * self._inner_scale if self._inner_scale != 1 else values).exp()
        return result * self._outer_scale if self._outer_scale != 1 else result


@register("Log")
class Log(Neuron):
    """log(shift + scale * x) to the given base; base -1 means e."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.log_param
        if settings.base != -1 and (settings.base <= 0 or settings.base == 1):
            raise self.error(f"log_param.base must be positive and not 1, or -1 for e; it is {settings.base}")
        self._scale: float = settings.scale
        self._shift: float = settings.shift
        self._factor: float = 1.0 if settings.base == -1 else 1.0 / math.log(settings.base)

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        result = (values * self._scale + self._shift).log()
        return result * self._factor if self._factor != 1 else result


@register("ELU")
class ELU(Neuron):
    """x above zero, alpha * (exp(x) - 1) below."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self._alpha: float = self.param.elu_param.alpha

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        return F.elu(values, self._alpha)


@register("Swish")
class Swish(Neuron):
    """x * sigmoid(beta * x)."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self._beta: float = self.param.swish_param.beta

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        return F.silu(values) if self._beta == 1 else values * torch.sigmoid(values * self._beta)


@register("Clip")
class Clip(Neuron):
    """Limits values to [min, max]; the gradient passes inside, bounds included."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self._low, self._high = self.param.clip_param.min, self.param.clip_param.max

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp(self._low, self._high)


@register("Threshold")
class Threshold(Neuron):
    """1 above the threshold, else 0; passes no gradient."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self._threshold: float = self.param.threshold_param.threshold

    def activate(self, values: torch.Tensor) -> torch.Tensor:
        return (values > self._threshold).to(values.dtype)
