"""Layers that only connect others: Input, Split, Silence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, exactly
from poseidon.caffe.layers.registry import register


@register("Input")
class Input(Layer):
    """Its tops are the blobs that the caller fills."""

    bottom_count = exactly(0)
    top_count = Count(1, None)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        shapes = self.param.input_param.shape
        if len(shapes) not in (0, 1, len(tops)):
            raise self.error(f"needs one shape, or one per top; {len(shapes)} given for {len(tops)} tops")
        for index, top in enumerate(tops if shapes else ()):
            top.reshape(*(shapes[0] if len(shapes) == 1 else shapes[index]).dim)

    def reshape(self, bottoms: Blobs, tops: Blobs) -> None:
        """Leave the shapes to the caller, who may change them between passes."""

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        """Do nothing: the caller has filled the blobs."""

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        """Do nothing: the layer has no bottoms."""


@register("Split")
class Split(Layer):
    """Passes one blob to several readers and sums their gradients."""

    top_count = Count(1, None)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        return [bottoms[0]] * len(self.param.top)

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        values = bottoms[0].data_tensor
        for top in tops:
            top.put_data(values, borrowed=True)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        if not propagate_down[0]:
            return
        # A reader outside the objective never writes its gradient, which then counts as zero.
        diffs = [top.diff_tensor for top in tops if top.has_diff]
        if len(diffs) == 1:
            bottoms[0].put_diff(diffs[0], borrowed=True)
        elif diffs:
            total = torch.add(diffs[0], diffs[1])
            for diff in diffs[2:]:
                total.add_(diff)
            bottoms[0].put_diff(total)
        else:
            bottoms[0].clear_diff()


@register("Silence")
class Silence(Layer):
    """Consumes blobs that no other layer reads, so that they are not outputs of the net."""

    bottom_count = Count(1, None)
    top_count = exactly(0)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        return []

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        """Do nothing."""

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        for bottom, wanted in zip(bottoms, propagate_down, strict=True):
            if wanted:
                bottom.clear_diff()
