"""Eltwise: combines blobs of one shape element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, Tensors
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema.messages import EltwiseParameter

Gradient = Callable[[int, torch.Tensor], torch.Tensor]


@register("Eltwise")
class Eltwise(Layer):
    """The product, weighted sum or maximum of its bottoms."""

    bottom_count = Count(2, None)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.eltwise_param
        self._coefficients: list[float] = list(settings.coeff) or [1.0] * len(bottoms)
        if len(self._coefficients) != len(bottoms):
            raise self.error(f"takes one coeff per bottom or none; {len(settings.coeff)} for {len(bottoms)} bottoms")
        if settings.coeff and settings.operation == EltwiseParameter.PROD:
            raise self.error("coeff is for sums, not for products")
        self._combine, self._gradient = self._ways()[settings.operation]

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        for name, shape in zip(self.param.bottom, bottoms, strict=True):
            if shape != bottoms[0]:
                raise self.error(
                    f"bottoms {self.param.bottom[0]!r} of shape {bottoms[0]} and {name!r} of shape {shape} "
                    "must have the same shape"
                )
        return [bottoms[0]]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        self._inputs = self.input_tensors(bottoms, tops)
        tops[0].put_data(self._combine(self._inputs))

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        diff = tops[0].diff_tensor
        gradients = [self._gradient(i, diff) if wanted else None for i, wanted in enumerate(propagate_down)]
        for bottom, gradient in zip(bottoms, gradients, strict=True):
            if gradient is not None:
                bottom.put_diff(gradient, borrowed=gradient is diff)

    def _ways(self) -> dict[int, tuple[Callable[[Tensors], torch.Tensor], Gradient]]:
        is_stable = self.param.eltwise_param.stable_prod_grad
        return {
            EltwiseParameter.PROD: (self._product, self._product_gradient if is_stable else self._quotient_gradient),
            EltwiseParameter.SUM: (self._sum, self._sum_gradient),
            EltwiseParameter.MAX: (self._greatest, self._greatest_gradient),
        }

    def _product(self, inputs: Tensors) -> torch.Tensor:
        result = inputs[0] * inputs[1]
        for values in inputs[2:]:
            result *= values
        self._result = result
        return result

    def _product_gradient(self, index: int, diff: torch.Tensor) -> torch.Tensor:
        result = diff
        for other, values in enumerate(self._inputs):
            if other != index:
                result = result * values
        return result

    def _quotient_gradient(self, index: int, diff: torch.Tensor) -> torch.Tensor:
        return self._result / self._inputs[index] * diff

    def _sum(self, inputs: Tensors) -> torch.Tensor:
        first, second, *others = self._coefficients
        scaled = inputs[0] if first == 1 else inputs[0] * first
        result = torch.add(scaled, inputs[1], alpha=second)
        for values, coefficient in zip(inputs[2:], others, strict=True):
            result.add_(values, alpha=coefficient)
        return result

    def _sum_gradient(self, index: int, diff: torch.Tensor) -> torch.Tensor:
        coefficient = self._coefficients[index]
        return diff if coefficient == 1 else diff * coefficient

    def _greatest(self, inputs: Tensors) -> torch.Tensor:
        # Between bottoms 0 and 1 a tie goes to bottom 1; later bottoms must be greater to win.
        is_first = inputs[0] > inputs[1]
        result = torch.where(is_first, inputs[0], inputs[1])
        self._winner = (~is_first).to(torch.int32)
        for index, values in enumerate(inputs[2:], 2):
            is_greater = values > result
            result = torch.where(is_greater, values, result)
            self._winner.masked_fill_(is_greater, index)
        return result

    def _greatest_gradient(self, index: int, diff: torch.Tensor) -> torch.Tensor:
        return diff * (self._winner == index)
