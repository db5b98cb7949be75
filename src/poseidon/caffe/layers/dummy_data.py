"""DummyData: blobs made by fillers instead of read from data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from poseidon.caffe import fillers
from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, exactly
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema import FillerParameter

T = TypeVar("T")

_OLDER = ("num", "channels", "height", "width")


@register("DummyData")
class DummyData(Layer):
    """Fills constant tops once, when the net is built, and all others anew in every pass."""

    bottom_count = exactly(0)
    top_count = Count(1, None)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.dummy_data_param
        given = list(settings.data_filler) or [FillerParameter(type="constant", value=0)]
        self._fillers: list[FillerParameter] = self._one_per_top("data_filler", given)
        for top, shape in zip(tops, self._shapes(), strict=True):
            top.reshape(*shape)
        self._fill(tops, constant=True)

    def reshape(self, bottoms: Blobs, tops: Blobs) -> None:
        """Do nothing: the shapes are fixed in the definition."""

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        self._fill(tops, constant=False)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        """Do nothing: there is nothing below."""

    def _fill(self, tops: Blobs, constant: bool) -> None:
        """Fill the tops whose filler is, or is not, constant."""
        for top, filler in zip(tops, self._fillers, strict=True):
            if (filler.type == "constant") == constant:
                top.put_data(fillers.fill(top.shape, filler, f"layer {self.name!r}"))

    def _shapes(self) -> list[Shape]:
        settings = self.param.dummy_data_param
        older = [list(getattr(settings, name)) for name in _OLDER]
        if not any(older):
            return [tuple(shape.dim) for shape in self._one_per_top("shape", list(settings.shape))]
        if settings.shape:
            raise self.error("shape and the older num, channels, height, width are both given; keep one form")
        columns = [self._one_per_top(name, sizes) for name, sizes in zip(_OLDER, older, strict=True)]
        return list(zip(*columns, strict=True))

    def _one_per_top(self, what: str, given: list[T]) -> list[T]:
        tops = len(self.param.top)
        if len(given) not in (1, tops):
            raise self.error(f"needs {what} once or once per top; {len(given)} given for {tops} tops")
        return given * tops if len(given) == 1 else given
