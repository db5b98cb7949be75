"""Measures of scores, without a gradient: Accuracy and ArgMax."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, exactly
from poseidon.caffe.layers.labels import as_indices
from poseidon.caffe.layers.registry import register


class Reading(Layer):
    """Base of layers that have a forward pass only."""

    def allow_force_backward(self, bottom_index: int) -> bool:
        return False

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        if any(propagate_down):
            raise self.error("has no gradient, so its tops cannot be part of an objective")


@register("Accuracy")
class Accuracy(Reading):
    """The fraction of predictions whose label is among the ``top_k`` best scores; top 1 holds it per class."""

    bottom_count = exactly(2)
    top_count = Count(1, 2)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.accuracy_param
        self._top_k: int = settings.top_k
        self._ignored: int | None = settings.ignore_label if settings.HasField("ignore_label") else None

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        scores, labels = bottoms
        self._axis = self.axis(self.param.accuracy_param.axis, len(scores))
        classes = scores[self._axis]
        places = math.prod(scores[: self._axis]) * math.prod(scores[self._axis + 1 :])
        if math.prod(labels) != places:
            raise self.error(
                f"bottom {self.param.bottom[1]!r} of shape {labels} must hold one label for each of the {places} "
                f"predictions in {self.param.bottom[0]!r} of shape {scores} (classes along axis {self._axis})"
            )
        if self._top_k > classes:
            raise self.error(f"top_k {self._top_k} exceeds the {classes} classes of shape {scores}")
        return [(), (classes,)][: len(self.param.top)]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        scores = bottoms[0].data_tensor.movedim(self._axis, -1)
        classes = scores.shape[-1]
        scores = scores.reshape(-1, classes)
        labels = bottoms[1].data_tensor.reshape(-1)
        if self._ignored is not None:
            kept = labels.long() != self._ignored
            scores, labels = scores[kept], labels[kept]
        numbers = as_indices(self, 1, labels, classes, "labels")
        # A score equal to the true class's counts as better, so a tie is a miss.
        rivals = (scores >= scores.gather(1, numbers[:, None])).sum(1) - 1
        hits = (rivals < self._top_k).to(scores.dtype)
        tops[0].put_data(hits.sum() / max(1, len(hits)))
        if len(tops) > 1:
            zeros = scores.new_zeros(classes)
            shown = zeros.index_add(0, numbers, torch.ones_like(hits))
            tops[1].put_data(zeros.index_add(0, numbers, hits) / shown.clamp(min=1))


@register("ArgMax")
class ArgMax(Reading):
    """The indices of the ``top_k`` greatest values, along an axis or in each flattened row; ties go to the last."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.argmax_param
        self._top_k: int = settings.top_k
        self._shows_values: bool = settings.out_max_val
        self._axis = self.axis(settings.axis, len(bottoms[0].shape)) if settings.HasField("axis") else None
        if not bottoms[0].shape:
            raise self.error(f"bottom {self.param.bottom[0]!r} must have at least one axis")

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        choices = math.prod(shape[1:]) if self._axis is None else shape[self._axis]
        if not 1 <= self._top_k <= choices:
            raise self.error(
                f"top_k {self._top_k} must be between 1 and the {choices} values to choose from "
                f"in {self.param.bottom[0]!r} of shape {shape}"
            )
        if self._axis is not None:
            return [(*shape[: self._axis], self._top_k, *shape[self._axis + 1 :])]
        kinds = 2 if self._shows_values else 1
        return [(shape[0], kinds, self._top_k, *[1] * (len(shape) - 3))]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        values = bottoms[0].data_tensor
        if self._axis is not None:
            best, places = _greatest(values, self._axis, self._top_k)
            tops[0].put_data(best if self._shows_values else places.to(values.dtype))
            return
        best, places = _greatest(values.reshape(values.shape[0], math.prod(values.shape[1:])), 1, self._top_k)
        parts = [places.to(values.dtype), best] if self._shows_values else [places.to(values.dtype)]
        tops[0].put_data(torch.stack(parts, 1).reshape(self.top_shapes([tuple(values.shape)])[0]))


def _greatest(values: torch.Tensor, axis: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest values and their indices in descending order; ties in descending order of index."""
    # Both branches below prefer the first of equals, so flip.
    flipped = values.flip(axis)
    if count == 1:
        best, places = flipped.max(axis, keepdim=True)
    else:
        best, places = (part.narrow(axis, 0, count) for part in flipped.sort(dim=axis, descending=True, stable=True))
    return best, values.shape[axis] - 1 - places
