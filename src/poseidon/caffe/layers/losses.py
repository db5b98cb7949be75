"""Losses between predictions and targets: EuclideanLoss, ContrastiveLoss, SigmoidCrossEntropyLoss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Tensors, exactly
from poseidon.caffe.layers.labels import refuse_gradient
from poseidon.caffe.layers.loss import LossLayer, Normalizer
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema.messages import LossParameter

# Caffe adds this to a distance to keep its gradient finite at zero.
_LEAST_DISTANCE = 1e-4


class PairLoss(LossLayer):
    """Base of losses that compare bottoms 0 and 1 element by element, whatever their axes."""

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        self.check_same_rows(bottoms)
        if math.prod(bottoms[0]) != math.prod(bottoms[1]):
            first, second = self.param.bottom[:2]
            raise self.error(
                f"bottoms {first!r} of shape {bottoms[0]} and {second!r} of shape {bottoms[1]} "
                "must hold the same number of values"
            )
        return [()]


@register("EuclideanLoss")
class EuclideanLoss(PairLoss):
    """Half the squared distance per row; both bottoms may learn."""

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        difference = inputs[0] - inputs[1].reshape(inputs[0].shape)
        return (difference.square().sum() / (2 * _rows(inputs[0])),)

    def allow_force_backward(self, bottom_index: int) -> bool:
        return True


@register("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLoss(PairLoss):
    """Cross entropy between the sigmoid of bottom 0 and the probabilities in bottom 1."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        super().setup(bottoms, tops)
        settings = LossParameter()
        settings.CopyFrom(self.param.loss_param)
        if not settings.HasField("normalization") and not settings.HasField("normalize"):
            # Unlike the softmax loss, this one divides by the number of rows by default.
            settings.normalization = LossParameter.BATCH_SIZE
        self._normalizer = Normalizer(settings)
        self._ignored: int | None = settings.ignore_label if settings.HasField("ignore_label") else None

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        scores, targets = inputs[0], inputs[1].reshape(inputs[0].shape)
        terms = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        valid: torch.Tensor | int = terms.numel()
        if self._ignored is not None:
            is_kept = targets.long() != self._ignored
            terms, valid = torch.where(is_kept, terms, 0.0), is_kept.sum()
        rows = _rows(scores)
        return (terms.sum() / self._normalizer.divisor(rows, scores.numel() // max(1, rows), valid),)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        refuse_gradient(self, propagate_down, 1, "targets")
        super().backward(tops, propagate_down, bottoms)


@register("ContrastiveLoss")
class ContrastiveLoss(PairLoss):
    """Pulls rows of bottoms 0 and 1 together where bottom 2 is not zero, and pushes the others a margin apart."""

    bottom_count = exactly(3)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        super().setup(bottoms, tops)
        self._margin: float = self.param.contrastive_loss_param.margin
        self._is_legacy: bool = self.param.contrastive_loss_param.legacy_version

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        shapes = super().top_shapes(bottoms)
        for name, shape in zip(self.param.bottom, bottoms, strict=True):
            if math.prod(shape[2:]) != 1:
                raise self.error(f"bottom {name!r} of shape {shape} must hold one vector per row")
        if not bottoms[0] or math.prod(bottoms[2]) != bottoms[0][0]:
            raise self.error(
                f"bottom {self.param.bottom[2]!r} of shape {bottoms[2]} must hold one value for each row of "
                f"{self.param.bottom[0]!r} of shape {bottoms[0]}"
            )
        return shapes

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        left, right, similar = (blob.data_tensor.reshape(blob.shape[0], math.prod(blob.shape[1:])) for blob in bottoms)
        self._difference = left - right
        self._is_similar = similar.long() != 0
        self._squared = self._difference.square().sum(1, keepdim=True)
        if self._is_legacy:
            apart = (self._margin - self._squared).clamp(min=0)
        else:
            apart = (self._margin - self._squared.sqrt()).clamp(min=0).square()
        terms = torch.where(self._is_similar, self._squared, apart)
        tops[0].put_data(terms.sum() / (2 * len(terms)))

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        refuse_gradient(self, propagate_down, 2, "marks of similar pairs")
        if self._is_legacy:
            lack, push = self._margin - self._squared, torch.ones_like(self._squared)
        else:
            distance = self._squared.sqrt()
            lack = self._margin - distance
            push = lack / (distance + _LEAST_DISTANCE)
        factors = torch.where(self._is_similar, 1.0, -push * (lack > 0))
        gradient = self._difference * factors * (tops[0].diff_tensor / len(self._difference))
        for bottom, wanted, sign in zip(bottoms, propagate_down, (1, -1), strict=False):
            if wanted:
                bottom.put_diff((gradient * sign).reshape(bottom.shape))

    def allow_force_backward(self, bottom_index: int) -> bool:
        return bottom_index != 2


def _rows(values: torch.Tensor) -> int:
    return values.shape[0] if values.dim() else 1
