"""InnerProduct: a fully connected layer whose weight gradient is a product of two thin matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Layer
from poseidon.caffe.layers.registry import register


@register("InnerProduct")
class InnerProduct(Layer):
    """Multiplies each row of the bottom by a weight matrix and adds a bias."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.inner_product_param
        if not settings.num_output:
            raise self.error("inner_product_param.num_output must be given and positive")
        self._outputs: int = settings.num_output
        self._axis = self.axis(settings.axis, len(bottoms[0].shape))
        self._inputs = math.prod(bottoms[0].shape[self._axis :])
        self._is_transposed: bool = settings.transpose
        shape = (self._inputs, self._outputs) if self._is_transposed else (self._outputs, self._inputs)
        self.make_param(0, shape, settings.weight_filler)
        if settings.bias_term:
            self.make_param(1, (self._outputs,), settings.bias_filler)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        if math.prod(shape[self._axis :]) != self._inputs:
            raise self.error(
                f"bottom {self.param.bottom[0]!r} has shape {shape}, that is {math.prod(shape[self._axis :])} inputs "
                f"per row; the weights have shape {self.blobs[0].shape} and need {self._inputs}"
            )
        return [(*shape[: self._axis], self._outputs)]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        (values,) = self.input_tensors(bottoms, tops)
        self._rows = values.reshape(-1, self._inputs)
        weight = self._weight()
        if len(self.blobs) > 1:
            result = torch.addmm(self.blobs[1].data_tensor, self._rows, weight.t())
        else:
            result = torch.mm(self._rows, weight.t())
        tops[0].put_data(result.view(*values.shape[: self._axis], self._outputs))

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        diff = tops[0].diff_tensor.reshape(-1, self._outputs)
        if self.param_propagate_down[0]:
            self._add_weight_diff(diff)
        if len(self.blobs) > 1 and self.param_propagate_down[1]:
            self.blobs[1].add_diff(diff.sum(0))
        if propagate_down[0]:
            bottoms[0].put_diff(torch.mm(diff, self._weight()).view(bottoms[0].shape))

    def _weight(self) -> torch.Tensor:
        """Return the weights as outputs x inputs, however they are stored."""
        weight = self.blobs[0].data_tensor
        return weight.t() if self._is_transposed else weight

    def _add_weight_diff(self, diff: torch.Tensor) -> None:
        if self.factor_sink is not None:
            self.factor_sink(diff, self._rows)
            return
        left, right = (self._rows, diff) if self._is_transposed else (diff, self._rows)
        if self.blobs[0].has_diff:
            self.blobs[0].diff_tensor.addmm_(left.t(), right)
        else:
            self.blobs[0].add_diff(torch.mm(left.t(), right))
