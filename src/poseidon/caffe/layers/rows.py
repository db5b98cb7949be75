"""Layers that select rows: BatchReindex and Filter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, Tensors, exactly
from poseidon.caffe.layers.labels import as_indices, refuse_gradient
from poseidon.caffe.layers.registry import register


@register("BatchReindex")
class BatchReindex(Layer):
    """Takes the rows of bottom 0 that bottom 1 lists, in that order; rows may repeat or be left out."""

    bottom_count = exactly(2)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        rows, numbers = bottoms
        if len(numbers) != 1 or not rows:
            raise self.error(
                f"needs rows in {self.param.bottom[0]!r} of shape {rows}, and a list of row numbers with one axis in "
                f"{self.param.bottom[1]!r} of shape {numbers}"
            )
        return [(numbers[0], *rows[1:])]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        return (inputs[0].index_select(0, as_indices(self, 1, inputs[1], inputs[0].shape[0], "row numbers")),)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        refuse_gradient(self, propagate_down, 1, "row numbers")
        super().backward(tops, propagate_down, bottoms)

    def allow_force_backward(self, bottom_index: int) -> bool:
        return bottom_index != 1


@register("Filter")
class Filter(Layer):
    """Keeps the rows whose entry in the last bottom is not zero; the tops' shapes follow its values."""

    bottom_count = Count(2, None)
    top_count = Count(1, None)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        if len(tops) != len(bottoms) - 1:
            raise self.error(
                f"needs one top per bottom except the selector; {len(bottoms)} bottoms and {len(tops)} tops given"
            )
        self._selector = len(bottoms) - 1
        self._kept: torch.Tensor | None = None

    def prepare(self, bottoms: Blobs, tops: Blobs) -> None:
        self._kept = bottoms[-1].data_tensor.reshape(-1).nonzero().reshape(-1)
        self.reshape(bottoms, tops)
        self._fill_loss_weights(tops)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        *filtered, selector = bottoms
        names = self.param.bottom
        if not selector or any(size != 1 for size in selector[1:]):
            raise self.error(f"selector {names[-1]!r} of shape {selector} must hold one value per row")
        for name, shape in zip(names, filtered, strict=False):
            if shape[:1] != selector[:1]:
                raise self.error(
                    f"bottom {name!r} of shape {shape} and selector {names[-1]!r} of shape {selector} "
                    "must have the same first dimension"
                )
        # Before the first pass the selector has no values, so all rows are assumed.
        rows = selector[0] if self._kept is None else len(self._kept)
        return [(rows, *shape[1:]) for shape in filtered]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        assert self._kept is not None
        kept = self._kept
        return tuple([rows.index_select(0, kept) for rows in inputs[: self._selector]])

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        refuse_gradient(self, propagate_down, self._selector, "selector")
        super().backward(tops, propagate_down, bottoms)

    def allow_force_backward(self, bottom_index: int) -> bool:
        return bottom_index != self._selector
