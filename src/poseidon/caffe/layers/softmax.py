"""Softmax, and the multinomial logistic loss on top of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, Tensors
from poseidon.caffe.layers.loss import LossLayer, Normalizer
from poseidon.caffe.layers.registry import register

# Caffe clamps probabilities to the smallest normal float before the logarithm.
_LEAST_LOG = math.log(torch.finfo(torch.float32).tiny)


@register("Softmax")
class Softmax(Layer):
    """Turns scores along an axis into probabilities."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self._axis = self.axis(self.param.softmax_param.axis, len(bottoms[0].shape))

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        return (torch.softmax(inputs[0], self._axis),)


@register("SoftmaxWithLoss")
class SoftmaxWithLoss(LossLayer):
    """Cross entropy between the softmax of bottom 0 and the class numbers in bottom 1; top 1 holds the softmax."""

    top_count = Count(1, 2)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        super().setup(bottoms, tops)
        self._axis = self.axis(self.param.softmax_param.axis, len(bottoms[0].shape))
        self._normalizer = Normalizer(self.param.loss_param)
        has_ignored = self.param.loss_param.HasField("ignore_label")
        self._ignored: int | None = self.param.loss_param.ignore_label if has_ignored else None

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        self.check_same_rows(bottoms)
        scores, labels = bottoms
        places = math.prod(scores) // max(1, scores[self._axis])
        if math.prod(labels) != places:
            raise self.error(
                f"bottom {self.param.bottom[1]!r} of shape {labels} must hold one label for each of the {places} "
                f"predictions in {self.param.bottom[0]!r} of shape {scores} (classes along axis {self._axis})"
            )
        return [(), scores][: self._top_number()]

    def _top_number(self) -> int:
        return max(1, len(self.param.top))

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        scores = bottoms[0].data_tensor
        place_shape = (*scores.shape[: self._axis], 1, *scores.shape[self._axis + 1 :])
        labels = bottoms[1].data_tensor.reshape(place_shape).long()
        self._kept = None if self._ignored is None else labels != self._ignored
        if self._kept is not None:
            labels = labels * self._kept
        self._labels = labels
        logs = torch.log_softmax(scores, self._axis)
        try:
            chosen = logs.gather(self._axis, labels).clamp(min=_LEAST_LOG)
        except RuntimeError as error:
            raise self._label_error(scores) from error
        if self._kept is not None:
            chosen = chosen * self._kept
        outer = math.prod(scores.shape[: self._axis])
        inner = math.prod(scores.shape[self._axis + 1 :])
        valid = None if self._kept is None else self._kept.sum()
        self._divisor = self._normalizer.divisor(outer, inner, valid)
        self._probabilities = logs.exp_()
        tops[0].put_data(-chosen.sum() / self._divisor)
        if len(tops) > 1:
            tops[1].put_data(self._probabilities, borrowed=True)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        if len(propagate_down) > 1 and propagate_down[1]:
            raise self.error("cannot backpropagate to the labels")
        if not propagate_down[0]:
            return
        ones = torch.ones((), device=self._labels.device).expand(self._labels.shape)
        gradient = self._probabilities.scatter_add(self._axis, self._labels, -ones)
        if self._kept is not None:
            gradient *= self._kept
        bottoms[0].put_diff(gradient.mul_(tops[0].diff_tensor / self._divisor))

    def _label_error(self, scores: torch.Tensor) -> Exception:
        low, high = int(self._labels.min()), int(self._labels.max())
        return self.error(
            f"labels in {self.param.bottom[1]!r} run from {low} to {high}, but {self.param.bottom[0]!r} of shape "
            f"{tuple(scores.shape)} has classes 0 to {scores.shape[self._axis] - 1}"
        )
