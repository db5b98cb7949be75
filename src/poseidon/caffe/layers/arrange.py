"""Layers that move values without changing them: Concat, Slice, Flatten, Reshape, Tile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, Tensors
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema.messages import ConcatParameter, SliceParameter


class Arrangement(Layer):
    """Base of layers whose axis may be given under an older name that allows no negative numbers."""

    def chosen_axis(self, settings: ConcatParameter | SliceParameter, older: str, axes: int) -> int:
        """Return ``axis``, or the field ``older`` if that is set."""
        if not settings.HasField(older):
            return self.axis(settings.axis, axes)
        if settings.HasField("axis"):
            raise self.error(f"axis {settings.axis} and {older} {getattr(settings, older)} are both given; keep one")
        return self.axis(getattr(settings, older), axes, older)

    def refuse_in_place(self, bottoms: Blobs, tops: Blobs) -> None:
        """Raise if a top is a bottom: one blob cannot have two shapes."""
        if tops[0] in bottoms:
            raise self.error(f"cannot work in place; give the top another name than {self.param.bottom[0]!r}")


@register("Concat")
class Concat(Arrangement):
    """Concatenates its bottoms along an axis."""

    bottom_count = Count(1, None)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        first = bottoms[0]
        self._axis = self.chosen_axis(self.param.concat_param, "concat_dim", len(first))
        for name, shape in zip(self.param.bottom, bottoms, strict=True):
            if len(shape) != len(first) or self._others(shape) != self._others(first):
                raise self.error(
                    f"bottoms {self.param.bottom[0]!r} of shape {first} and {name!r} of shape {shape} may differ "
                    f"along axis {self._axis} only"
                )
        total = sum(shape[self._axis] for shape in bottoms)
        return [(*first[: self._axis], total, *first[self._axis + 1 :])]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        return (torch.cat(inputs, self._axis),)

    def _others(self, shape: Shape) -> Shape:
        return shape[: self._axis] + shape[self._axis + 1 :]


@register("Slice")
class Slice(Arrangement):
    """Cuts its bottom along an axis, at the given points or into equal parts."""

    top_count = Count(1, None)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        self._axis = self.chosen_axis(self.param.slice_param, "slice_dim", len(shape))
        self._sizes = self._cut(shape)
        return [(*shape[: self._axis], size, *shape[self._axis + 1 :]) for size in self._sizes]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        return tuple(inputs[0].split(self._sizes, self._axis))

    def _cut(self, shape: Shape) -> list[int]:
        points, size, parts = list(self.param.slice_param.slice_point), shape[self._axis], len(self.param.top)
        where = f"axis {self._axis} of {self.param.bottom[0]!r} of shape {shape}"
        if not points:
            if size % parts:
                raise self.error(f"{where} cannot be cut into {parts} equal parts, one per top; give slice_point")
            return [size // parts] * parts
        if len(points) != parts - 1:
            raise self.error(f"{parts} tops need {parts - 1} slice_point(s), {len(points)} given")
        sizes = [end - start for start, end in zip([0, *points], [*points, size], strict=True)]
        if min(sizes) <= 0:
            raise self.error(f"slice_point {points} must rise and lie inside {where}")
        return sizes


@register("Flatten")
class Flatten(Arrangement):
    """Merges the axes from ``axis`` to ``end_axis`` into one."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self.refuse_in_place(bottoms, tops)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        settings = self.param.flatten_param
        start = self.axis(settings.axis, len(shape))
        end = self.axis(settings.end_axis, len(shape), "end_axis") + 1
        if end < start:
            raise self.error(f"axis {settings.axis} lies after end_axis {settings.end_axis} for shape {shape}")
        return [(*shape[:start], math.prod(shape[start:end]), *shape[end:])]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        return (inputs[0].reshape(self.top_shapes([tuple(inputs[0].shape)])[0]),)


@register("Reshape")
class Reshape(Arrangement):
    """Replaces ``num_axes`` axes from ``axis`` on by new ones: 0 copies a dimension, -1 means what is left."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self.refuse_in_place(bottoms, tops)
        self._dims: list[int] = list(self.param.reshape_param.shape.dim)
        if self._dims.count(-1) > 1 or any(size < -1 for size in self._dims):
            raise self.error(f"shape {self._dims} may hold -1 once, and nothing below")

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        start, end = self._replaced(shape)
        middle = [self._copied(shape, start + i) if size == 0 else size for i, size in enumerate(self._dims)]
        known = math.prod(shape[:start]) * math.prod(shape[end:]) * math.prod(size for size in middle if size != -1)
        if -1 in middle and known and math.prod(shape) % known == 0:
            middle[middle.index(-1)] = math.prod(shape) // known
        result = (*shape[:start], *middle, *shape[end:])
        if -1 in middle or math.prod(result) != math.prod(shape):
            raise self.error(
                f"bottom {self.param.bottom[0]!r} of shape {shape} ({math.prod(shape)} values) does not fit {result}"
            )
        return [result]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        return (inputs[0].reshape(self.top_shapes([tuple(inputs[0].shape)])[0]),)

    def _replaced(self, shape: Shape) -> tuple[int, int]:
        """Return the first axis to replace and the one after the last."""
        settings, axes = self.param.reshape_param, len(shape)
        # A negative axis may also mean the end, so there is one more than elsewhere.
        start = settings.axis if settings.axis >= 0 else axes + settings.axis + 1
        end = axes if settings.num_axes == -1 else start + settings.num_axes
        if not 0 <= start <= end <= axes:
            raise self.error(f"axis {settings.axis} with num_axes {settings.num_axes} is out of range for {shape}")
        return start, end

    def _copied(self, shape: Shape, axis: int) -> int:
        if axis >= len(shape):
            raise self.error(f"shape {self._dims} copies axis {axis}, which bottom of shape {shape} does not have")
        return shape[axis]


@register("Tile")
class Tile(Arrangement):
    """Repeats its bottom along an axis."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self._tiles: int = self.param.tile_param.tiles
        if self._tiles < 1:
            raise self.error(f"tile_param.tiles must be given and positive; it is {self._tiles}")

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        (shape,) = bottoms
        self._axis = self.axis(self.param.tile_param.axis, len(shape))
        return [(*shape[: self._axis], shape[self._axis] * self._tiles, *shape[self._axis + 1 :])]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        return (inputs[0].repeat(*[self._tiles if i == self._axis else 1 for i in range(inputs[0].dim())]),)
