"""Recurrent layers: LSTM, RNN and the single step LSTMUnit.

Sequences lie along the first axis, independent streams along the second. Where ``cont`` is 0 a new sequence begins and
the state is reset. The final state of one pass is the initial state of the next, but gradients do not cross passes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Count, Layer, Tensors, exactly
from poseidon.caffe.layers.labels import refuse_gradient
from poseidon.caffe.layers.registry import register

log = logging.getLogger("poseidon.caffe")


class _Step(torch.autograd.Function):
    """One step of an LSTM: (cell, gate inputs, continuation) to (new cell, hidden), with Caffe's gradients."""

    @staticmethod
    def forward(ctx: Any, cell: torch.Tensor, gates: torch.Tensor, cont: torch.Tensor) -> Tensors:
        """Gates come in the order input, forget, output, candidate; ``cont`` has one value per stream."""
        units = cell.shape[-1]
        let_in, forget, let_out = torch.sigmoid(gates[..., : 3 * units]).split(units, -1)
        forget = forget * cont
        candidate = torch.tanh(gates[..., 3 * units :])
        new_cell = torch.addcmul(let_in * candidate, forget, cell)
        squashed = torch.tanh(new_cell)
        ctx.save_for_backward(cell, let_in, forget, let_out, candidate, squashed)
        return new_cell, let_out * squashed

    @staticmethod
    def backward(ctx: Any, *diffs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of cell and gates; continuation marks have none."""
        cell, let_in, forget, let_out, candidate, squashed = ctx.saved_tensors
        cell_diff, hidden_diff = diffs
        total = cell_diff + hidden_diff * let_out * (1 - squashed * squashed)
        gates = [
            total * candidate * let_in * (1 - let_in),
            total * cell * forget * (1 - forget),
            hidden_diff * squashed * let_out * (1 - let_out),
            total * let_in * (1 - candidate * candidate),
        ]
        return total * forget, torch.cat(gates, -1), None


@register("LSTMUnit")
class LSTMUnit(Layer):
    """One step: from cells (1 x N x H), gate inputs (1 x N x 4H) and marks (1 x N) to new cells and hidden values."""

    bottom_count = exactly(3)
    top_count = exactly(2)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        cells, gates, cont = bottoms
        streams, units = (*cells[1:], 0, 0)[:2]
        if cells != (1, streams, units) or gates != (1, streams, 4 * units) or cont != (1, streams):
            first, second, third = self.param.bottom
            raise self.error(
                f"bottoms {first!r} of shape {cells}, {second!r} of shape {gates} and {third!r} of shape {cont} "
                "must have the shapes (1, N, H), (1, N, 4H) and (1, N)"
            )
        return [cells, cells]

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        cells, gates, cont = inputs
        result: Tensors = _Step.apply(cells, gates, cont[..., None])  # type: ignore[no-untyped-call]
        return result

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        refuse_gradient(self, propagate_down, 2, "sequence marks")
        super().backward(tops, propagate_down, bottoms)

    def allow_force_backward(self, bottom_index: int) -> bool:
        return bottom_index != 2


class Recurrent(Layer):
    """Base of layers that run over time.

    Bottoms: values (T x N x ...), marks (T x N), optionally a static input (N x ...), and with ``expose_hidden`` the
    first states (1 x N x units). Tops: the outputs, and with ``expose_hidden`` the last states.
    """

    bottom_count = Count(2, 5)
    top_count = Count(1, 3)
    state_count: ClassVar[int]
    """How many blobs make up the state."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.recurrent_param
        if not settings.num_output:
            raise self.error("recurrent_param.num_output must be given and positive")
        self._units: int = settings.num_output
        self._is_exposed: bool = settings.expose_hidden
        self._check_blob_counts(len(bottoms), len(tops))
        self._has_static = len(bottoms) > 2 + self._exposed_count
        self._steps = bottoms[0].shape[0] if bottoms[0].shape else 0
        self._state: Tensors | None = None
        self._check_shapes([blob.shape for blob in bottoms])
        log.info(
            "Initializing recurrent layer: assuming input batch contains %d timesteps of %d independent streams.",
            *bottoms[0].shape[:2],
        )
        self._make_params(bottoms)

    def param_shapes(self, inputs: int, static_inputs: int | None) -> dict[str, Shape]:
        """Return the parameters by Caffe's names, in Caffe's order; biases have one axis."""
        raise TypeError(f"layer type {self.type} defines no parameters")

    def unroll(
        self, drive: torch.Tensor, cont: torch.Tensor, state: Tensors, params: dict[str, torch.Tensor]
    ) -> Tensors:
        """Run over time from ``state``; return outputs and last states. ``drive`` is the inputs' contribution."""
        raise TypeError(f"layer type {self.type} defines no recurrence")

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        self._check_shapes(bottoms)
        streams = bottoms[0][1]
        return [(self._steps, streams, self._units), *[(1, streams, self._units)] * self._exposed_count]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        super().forward(bottoms, tops)
        self._state = self._next_state

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        named = dict(zip(self._param_names, params, strict=True))
        (input_weight, input_bias), values = params[:2], inputs[0]
        drive = values.flatten(2) @ input_weight.t() + input_bias
        if self._has_static:
            drive = drive + inputs[2].flatten(1) @ params[2].t()
        outputs, *last = self.unroll(drive, inputs[1][..., None], self._first_state(inputs), named)
        self._next_state = tuple([part.detach()[None] for part in last])
        return (outputs, *self._next_state)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        refuse_gradient(self, propagate_down, 1, "sequence marks")
        super().backward(tops, propagate_down, bottoms)

    def allow_force_backward(self, bottom_index: int) -> bool:
        return bottom_index != 1

    @property
    def _exposed_count(self) -> int:
        return self.state_count if self._is_exposed else 0

    def _first_state(self, inputs: Tensors) -> Tensors:
        """Return the initial states, detached from their graph."""
        streams = inputs[0].shape[1]
        if self._is_exposed:
            return tuple([part.detach()[0] for part in inputs[-self.state_count :]])
        if self._state is None or self._state[0].shape[1] != streams:
            return (inputs[0].new_zeros(streams, self._units),) * self.state_count
        return tuple([part[0].to(inputs[0]) for part in self._state])

    def _make_params(self, bottoms: Blobs) -> None:
        settings = self.param.recurrent_param
        static_inputs = math.prod(bottoms[2].shape[1:]) if self._has_static else None
        shapes = self.param_shapes(math.prod(bottoms[0].shape[2:]), static_inputs)
        self._param_names = list(shapes)
        for index, (name, shape) in enumerate(shapes.items()):
            log.info("Adding parameter %d: %s", index, name)
            self.make_param(index, shape, settings.bias_filler if len(shape) == 1 else settings.weight_filler)

    def _check_blob_counts(self, bottoms: int, tops: int) -> None:
        least, wanted = 2 + self._exposed_count, 1 + self._exposed_count
        if bottoms not in (least, least + 1) or tops != wanted:
            raise self.error(
                f"with expose_hidden {str(self._is_exposed).lower()} takes {least} bottom blobs (or {least + 1} with a "
                f"static input) and {wanted} top blob(s); {bottoms} and {tops} given"
            )

    def _check_shapes(self, bottoms: Sequence[Shape]) -> None:
        names = self.param.bottom
        values, cont = bottoms[:2]
        if len(values) < 3 or cont != values[:2]:
            raise self.error(
                f"bottoms {names[0]!r} of shape {values} and {names[1]!r} of shape {cont} must have the shapes "
                "(T, N, ...) and (T, N)"
            )
        if values[0] != self._steps:
            raise self.error(f"bottom {names[0]!r} changed from {self._steps} steps to {values[0]} (shape {values})")
        if self._has_static and (len(bottoms[2]) < 2 or bottoms[2][0] != values[1]):
            raise self.error(
                f"static input {names[2]!r} of shape {bottoms[2]} must have the shape ({values[1]}, ...): one row for "
                f"each stream of {names[0]!r} of shape {values}"
            )
        for name, shape in list(zip(names, bottoms, strict=True))[len(bottoms) - self._exposed_count :]:
            if shape != (1, values[1], self._units):
                raise self.error(f"state {name!r} has shape {shape}, expected {(1, values[1], self._units)}")


@register("LSTM")
class LSTM(Recurrent):
    """Long short-term memory; gates in the order input, forget, output, candidate."""

    state_count = 2

    def param_shapes(self, inputs: int, static_inputs: int | None) -> dict[str, Shape]:
        gates = 4 * self._units
        static = {} if static_inputs is None else {"W_xc_static": (gates, static_inputs)}
        return {"W_xc": (gates, inputs), "b_c": (gates,), **static, "W_hc": (gates, self._units)}

    def unroll(
        self, drive: torch.Tensor, cont: torch.Tensor, state: Tensors, params: dict[str, torch.Tensor]
    ) -> Tensors:
        hidden, cell = state
        weight, outputs = params["W_hc"].t(), []
        for step_drive, step_cont in zip(drive, cont, strict=True):
            gates = torch.addmm(step_drive, hidden * step_cont, weight)
            cell, hidden = _Step.apply(cell, gates, step_cont)  # type: ignore[no-untyped-call]
            outputs.append(hidden)
        return torch.stack(outputs), hidden, cell


@register("RNN")
class RNN(Recurrent):
    """A plain recurrent network: hidden = tanh(inputs + W_hh hidden), output = tanh(W_ho hidden + b_o)."""

    state_count = 1

    def param_shapes(self, inputs: int, static_inputs: int | None) -> dict[str, Shape]:
        units = self._units
        static = {} if static_inputs is None else {"W_xh_static": (units, static_inputs)}
        square = (units, units)
        return {"W_xh": (units, inputs), "b_h": (units,), **static, "W_hh": square, "W_ho": square, "b_o": (units,)}

    def unroll(
        self, drive: torch.Tensor, cont: torch.Tensor, state: Tensors, params: dict[str, torch.Tensor]
    ) -> Tensors:
        (hidden,) = state
        weight, states = params["W_hh"].t(), []
        for step_drive, step_cont in zip(drive, cont, strict=True):
            hidden = torch.tanh(torch.addmm(step_drive, hidden * step_cont, weight))
            states.append(hidden)
        return torch.tanh(torch.stack(states) @ params["W_ho"].t() + params["b_o"]), hidden
