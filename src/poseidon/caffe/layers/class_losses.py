"""Losses against class numbers: HingeLoss, MultinomialLogisticLoss, InfogainLoss (softmax's is in ``softmax.py``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from poseidon.caffe.blob import Blob, Shape
from poseidon.caffe.layers.base import Blobs, Count
from poseidon.caffe.layers.labels import as_indices, refuse_gradient
from poseidon.caffe.layers.loss import LossLayer, Normalizer
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema import BlobProto
from poseidon.caffe.schema.files import read_binary
from poseidon.caffe.schema.messages import HingeLossParameter
from poseidon.errors import ConfigError

# The two losses named after it clamp probabilities to this value before the logarithm, as in Caffe.
_LEAST_PROBABILITY = 1e-20


class RowClassLoss(LossLayer):
    """Base of losses with one class per row; all other axes of bottom 0 count as classes."""

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        self.check_same_rows(bottoms)
        scores, labels = bottoms
        if not scores or math.prod(labels) != scores[0]:
            raise self.error(
                f"bottom {self.param.bottom[1]!r} of shape {labels} must hold one label for each row of "
                f"{self.param.bottom[0]!r} of shape {scores}"
            )
        return [()]

    def rows_and_labels(self, bottoms: Blobs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores as a matrix and the labels as a column of class numbers."""
        scores = bottoms[0].data_tensor.reshape(bottoms[0].shape[0], math.prod(bottoms[0].shape[1:]))
        return scores, as_indices(self, 1, bottoms[1].data_tensor.reshape(-1, 1), scores.shape[1], "labels")

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        refuse_gradient(self, propagate_down, 1, "labels")
        if propagate_down[0]:
            gradient = self.gradient() * (tops[0].diff_tensor / bottoms[0].shape[0])
            bottoms[0].put_diff(gradient.reshape(bottoms[0].shape))

    def gradient(self) -> torch.Tensor:
        """Return the gradient of the sum over rows."""
        raise TypeError(f"layer type {self.type} defines no gradient")


@register("HingeLoss")
class HingeLoss(RowClassLoss):
    """One against all: the true class's score should exceed 1, all others stay below -1; L1 or squared."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        super().setup(bottoms, tops)
        self._is_squared = self.param.hinge_loss_param.norm == HingeLossParameter.L2

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        scores, labels = self.rows_and_labels(bottoms)
        self._signs = torch.ones_like(scores).scatter_(1, labels, -1.0)
        self._lack = (1 + self._signs * scores).clamp(min=0)
        terms = self._lack.square() if self._is_squared else self._lack
        tops[0].put_data(terms.sum() / len(scores))

    def gradient(self) -> torch.Tensor:
        return self._signs * (2 * self._lack if self._is_squared else self._lack.sign())


@register("MultinomialLogisticLoss")
class MultinomialLogisticLoss(RowClassLoss):
    """The negative logarithm of the true class's probability; bottom 0 holds probabilities."""

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        scores, self._labels = self.rows_and_labels(bottoms)
        self._columns = scores.shape[1]
        self._chosen = scores.gather(1, self._labels).clamp(min=_LEAST_PROBABILITY)
        tops[0].put_data(-self._chosen.log().sum() / len(scores))

    def gradient(self) -> torch.Tensor:
        zeros = self._chosen.new_zeros(len(self._chosen), self._columns)
        return zeros.scatter_(1, self._labels, -1 / self._chosen)


@register("InfogainLoss")
class InfogainLoss(LossLayer):
    """Cross entropy between the softmax of bottom 0 and the rows of a matrix H chosen by the labels in bottom 1.

    H comes from a file (``infogain_loss_param.source``) or as bottom 2; top 1 shows the softmax.
    """

    bottom_count = Count(2, 3)
    top_count = Count(1, 2)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        super().setup(bottoms, tops)
        settings = self.param.loss_param
        if settings.HasField("normalize"):
            raise self.error("loss_param.normalize is not supported here; use normalization")
        self._normalizer = Normalizer(settings)
        self._ignored: int | None = settings.ignore_label if settings.HasField("ignore_label") else None
        self._stored = None if len(bottoms) > 2 else self._read_matrix()

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        self.check_same_rows(bottoms)
        scores, labels = bottoms[:2]
        self._axis = self.axis(self.param.infogain_loss_param.axis, len(scores))
        self._outer, classes = math.prod(scores[: self._axis]), scores[self._axis]
        self._inner = math.prod(scores[self._axis + 1 :])
        if math.prod(labels) != self._outer * self._inner:
            raise self.error(
                f"bottom {self.param.bottom[1]!r} of shape {labels} must hold one label for each of the "
                f"{self._outer * self._inner} predictions in {self.param.bottom[0]!r} of shape {scores} "
                f"(classes along axis {self._axis})"
            )
        matrix = bottoms[2] if self._stored is None else self._stored.shape
        if math.prod(matrix) != classes**2:
            raise self.error(
                f"H of shape {matrix} must be {classes} x {classes} for the {classes} classes of "
                f"{self.param.bottom[0]!r} of shape {scores}"
            )
        return [(), scores][: max(1, len(self.param.top))]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        scores = bottoms[0].data_tensor
        classes = scores.shape[self._axis]
        labels = bottoms[1].data_tensor.reshape(self._outer, self._inner)
        is_kept = (
            torch.ones_like(labels) if self._ignored is None else (labels.long() != self._ignored).to(labels.dtype)
        )
        numbers = as_indices(self, 1, labels * is_kept, classes, "labels")
        matrix = (bottoms[2] if self._stored is None else self._stored).data_tensor.reshape(classes, classes)
        # Rows of H in the layout of the scores: outer x classes x inner, zero where the label is ignored.
        self._weights = (matrix[numbers] * is_kept[..., None]).transpose(1, 2)
        logs = torch.log_softmax(scores, self._axis)
        self._probabilities = logs.exp()
        self._divisor = self._normalizer.divisor(self._outer, self._inner, is_kept.sum())
        clamped = logs.clamp(min=math.log(_LEAST_PROBABILITY)).reshape(self._weights.shape)
        tops[0].put_data(-(self._weights * clamped).sum() / self._divisor)
        if len(tops) > 1:
            tops[1].put_data(self._probabilities, borrowed=True)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        refuse_gradient(self, propagate_down, 1, "labels")
        refuse_gradient(self, propagate_down, 2, "matrix")
        if propagate_down[0]:
            probabilities = self._probabilities.reshape(self._weights.shape)
            gradient = probabilities * self._weights.sum(1, keepdim=True) - self._weights
            bottoms[0].put_diff((gradient * (tops[0].diff_tensor / self._divisor)).reshape(bottoms[0].shape))

    def allow_force_backward(self, bottom_index: int) -> bool:
        return bottom_index == 0

    def _read_matrix(self) -> Blob:
        source = self.param.infogain_loss_param.source
        if not source:
            raise self.error("needs H: infogain_loss_param.source, or a third bottom")
        blob = Blob()
        try:
            blob.from_proto(read_binary(source, BlobProto))
        except ConfigError as error:
            raise self.error(f"H cannot be read: {error}") from error
        return blob
