"""The contract between a net and its layers.

A layer is built from its LayerParameter, then ``setup`` creates its parameters and ``top_shapes`` returns the shapes of
its results. A layer type then chooses one of two ways to compute:

* override ``compute``: a function of tensors built from PyTorch operations. The base class records a small graph of
  this layer alone and derives the backward pass from it;
* override ``forward`` and ``backward``, which work on blobs, where Caffe's gradients differ from autograd's or a
  faster implementation exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from poseidon.caffe import fillers
from poseidon.caffe.blob import Blob, BlobVec, Shape
from poseidon.caffe.schema import TRAIN, FillerParameter, LayerParameter
from poseidon.errors import ConfigError

Blobs = Sequence[Blob]
Tensors = tuple[torch.Tensor, ...]
FactorSink = Callable[[torch.Tensor, torch.Tensor], None]


class Count(NamedTuple):
    """How many bottoms or tops a layer takes; ``high`` None means any number above ``low``."""

    low: int
    high: int | None

    def __str__(self) -> str:
        if self.low == self.high:
            return f"exactly {self.low}"
        return f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"


def exactly(count: int) -> Count:
    """Return the Count that allows ``count`` only."""
    return Count(count, count)


class _Graph(NamedTuple):
    """The record of one forward pass: its leaves and its results."""

    inputs: Tensors
    params: Tensors
    outputs: Tensors


class Layer:
    """One layer of a net; subclasses are registered under Caffe's type name."""

    type: ClassVar[str] = ""
    bottom_count: ClassVar[Count] = exactly(1)
    top_count: ClassVar[Count] = exactly(1)
    equal_counts: ClassVar[bool] = False
    """Whether there must be one top per bottom."""
    makes_missing_tops: ClassVar[bool] = False
    """Whether the net adds unnamed tops up to the minimum."""

    def __init__(self, param: LayerParameter) -> None:
        self.param = param
        self.name: str = param.name
        self.blobs = BlobVec()
        for stored in param.blobs:
            self.blobs.append(Blob())
            self.blobs[-1].from_proto(stored)
        self.loss_weights: list[float] = []
        # Set by the net once it knows which gradients are needed.
        self.needs_backward = False
        self.propagate_down: list[bool] = []
        self.param_propagate_down: list[bool] = []
        self.factor_sink: FactorSink | None = None
        """Takes (top gradient, bottom values) of a layer whose weight gradient is their product, instead of it."""
        self._graph: _Graph | None = None
        self._seen_shapes: tuple[Shape, ...] | None = None

    @property
    def is_training(self) -> bool:
        """Whether the layer belongs to a net of the TRAIN phase."""
        return bool(self.param.phase == TRAIN)

    # Overridden by layer types.

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        """Check the settings and create parameters; runs once, with shaped bottoms and unshaped tops."""

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        """Return the shape of every top; runs whenever a bottom's shape has changed. Default: the bottoms' shapes."""
        return bottoms

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        """Return the tops' values from bottoms and parameters, changing neither."""
        raise TypeError(f"layer type {self.type} defines neither compute nor forward")

    def allow_force_backward(self, bottom_index: int) -> bool:
        """Whether ``force_backward`` may request this bottom's gradient (not for labels)."""
        return True

    # Called by the net; override forward and backward together.

    def reshape(self, bottoms: Blobs, tops: Blobs) -> None:
        """Give the tops their shapes."""
        shapes = self.top_shapes([blob.shape for blob in bottoms])
        for top, shape in zip(tops, shapes, strict=True):
            top.reshape(*shape)

    def prepare(self, bottoms: Blobs, tops: Blobs) -> None:
        """Reshape before a forward pass if a bottom has changed its shape since the last one."""
        shapes = tuple([blob.shape for blob in bottoms])
        if shapes != self._seen_shapes:
            self.reshape(bottoms, tops)
            self._fill_loss_weights(tops)
            self._seen_shapes = shapes

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        """Compute the tops and, if this layer has a backward pass, keep what it needs."""
        inputs = self.input_tensors(bottoms, tops)
        params = tuple([blob.data_tensor for blob in self.blobs])
        if self.needs_backward:
            for tensor, wanted in zip(inputs, self.propagate_down, strict=True):
                tensor.requires_grad_(wanted)
            params = tuple([tensor.data for tensor in params])
            for tensor, wanted in zip(params, self.param_propagate_down, strict=True):
                tensor.requires_grad_(wanted)
            with torch.enable_grad():
                outputs = self.compute(inputs, params)
            self._graph = _Graph(inputs, params, outputs)
        else:
            with torch.no_grad():
                outputs = self.compute(inputs, params)
        lenders = {_storage(tensor) for tensor in inputs}
        for top, output in zip(tops, outputs, strict=False):
            top.put_data(output.data, borrowed=_storage(output) in lenders)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        """Turn the tops' gradients into the bottoms' (overwritten) and the parameters' (added up)."""
        if self._graph is None:
            raise self.error("backward was called before forward")
        inputs, params, outputs = self._graph
        pairs = [
            (output, _laid_out_like(output, top.diff_tensor))
            for top, output in zip(tops, outputs, strict=False)
            if output.requires_grad and top.has_diff
        ]
        leaves = [tensor for tensor in (*inputs, *params) if tensor.requires_grad]
        if not pairs:
            gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
        else:
            gradients = torch.autograd.grad(
                [output for output, _ in pairs],
                leaves,
                [diff for _, diff in pairs],
                retain_graph=True,
                allow_unused=True,
            )
        self._store(gradients, bottoms, [diff for _, diff in pairs])

    def _store(self, gradients: Sequence[torch.Tensor | None], bottoms: Blobs, diffs: list[torch.Tensor]) -> None:
        assert self._graph is not None
        lenders = [_storage(tensor) for tensor in (*diffs, *(g for g in gradients if g is not None))]
        remaining = iter(gradients)
        for bottom, leaf in zip(bottoms, self._graph.inputs, strict=True):
            if leaf.requires_grad:
                gradient = next(remaining)
                if gradient is None:
                    bottom.clear_diff()
                else:
                    bottom.put_diff(gradient, borrowed=lenders.count(_storage(gradient)) > 1)
        for blob, leaf in zip(self.blobs, self._graph.params, strict=True):
            if leaf.requires_grad:
                gradient = next(remaining)
                if gradient is not None:
                    # A parameter's gradient is later changed in place, so it must not share memory with another blob's.
                    is_shared = lenders.count(_storage(gradient)) > 1
                    blob.add_diff(gradient.clone() if is_shared else gradient)

    # Helpers for layer types.

    def input_tensors(self, bottoms: Blobs, tops: Blobs) -> Tensors:
        """Return the bottoms' values as tensors that may be kept until ``backward``."""
        # A viewed blob is overwritten in place, so an in-place layer keeps a copy of its input.
        return tuple(
            [
                bottom.data_tensor.clone() if bottom.is_viewed and bottom in tops else bottom.data_tensor.data
                for bottom in bottoms
            ]
        )

    def make_param(self, index: int, shape: Sequence[int], filler: FillerParameter | None = None) -> Blob:
        """Create and fill parameter ``index``, or check the one that came with the layer's definition."""
        if index < len(self.blobs):
            if self.blobs[index].shape != tuple(shape):
                raise self.error(
                    f"parameter {index} given in the definition has shape {self.blobs[index].shape}, "
                    f"expected {tuple(shape)}"
                )
            return self.blobs[index]
        assert index == len(self.blobs), "parameters are created in order"
        blob = Blob(shape)
        self.blobs.append(blob)
        if filler is not None:
            blob.put_data(fillers.fill(tuple(shape), filler, f"layer {self.name!r}"))
        return blob

    def axis(self, axis: int, axes: int, what: str = "axis") -> int:
        """Return a (possibly negative) axis counted from the front; raises if it is out of range."""
        if not -axes <= axis < axes:
            raise self.error(f"{what} {axis} is out of range for a bottom with {axes} axes")
        return axis % axes

    def error(self, text: str) -> ConfigError:
        """Return an error that names this layer."""
        return ConfigError(f"layer {self.name!r} ({self.type}): {text}")

    # Setting up, called by the net.

    def set_up(self, bottoms: Blobs, tops: Blobs) -> None:
        """Check the number of bottoms and tops, then set up, shape the tops and spread loss weights."""
        self._check_counts(len(bottoms), len(tops))
        self.setup(bottoms, tops)
        self.reshape(bottoms, tops)
        self._seen_shapes = tuple(blob.shape for blob in bottoms)
        weights = list(self.param.loss_weight)
        if weights and len(weights) != len(tops):
            raise self.error(
                f"loss_weight must be given once per top or not at all; there are {len(weights)} for {len(tops)} tops"
            )
        self.loss_weights = weights or [0.0] * len(tops)
        self._fill_loss_weights(tops)

    def _check_counts(self, bottoms: int, tops: int) -> None:
        for kind, count, allowed in (("bottom", bottoms, self.bottom_count), ("top", tops, self.top_count)):
            if count < allowed.low or (allowed.high is not None and count > allowed.high):
                raise self.error(f"takes {allowed} {kind} blob(s), {count} given")
        if self.equal_counts and bottoms != tops:
            raise self.error(f"makes one top per bottom; {bottoms} bottoms and {tops} tops given")

    def _fill_loss_weights(self, tops: Blobs) -> None:
        for top, weight in zip(tops, self.loss_weights, strict=False):
            if weight:
                top.put_diff(torch.full_like(top.data_tensor, weight))

    def loss(self, tops: Blobs) -> torch.Tensor | None:
        """Return this layer's part of the objective: tops times their loss weights."""
        terms = [
            torch.dot(top.data_tensor.reshape(-1), top.diff_tensor.reshape(-1))
            for top, weight in zip(tops, self.loss_weights, strict=False)
            if weight
        ]
        return sum(terms[1:], terms[0]) if terms else None

    def to_proto(self, write_diff: bool = False) -> LayerParameter:
        """Return the layer's definition with its parameters."""
        result = type(self.param)()
        result.CopyFrom(self.param)
        result.ClearField("blobs")
        result.blobs.extend([blob.to_proto(write_diff) for blob in self.blobs])
        return result


def _laid_out_like(output: torch.Tensor, diff: torch.Tensor) -> torch.Tensor:
    """Return the gradient in the memory layout of the output."""
    # PyTorch picks kernels by the gradient's layout; if the layouts differ, it copies the operands or runs slowly.
    is_inside = output.dim() == 4 and output.is_contiguous(memory_format=torch.channels_last)
    return diff.contiguous(memory_format=torch.channels_last) if is_inside else diff


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
