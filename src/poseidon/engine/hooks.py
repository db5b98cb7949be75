"""Step 1 of the journey: PyTorch's autograd reports that a gradient, or its factors, is ready.

After: ``backward.py``, by way of the engine. A hook on the node that accumulates a parameter's gradient fires when that
gradient is final in this backward, however the model used the parameter. Layers whose gradients travel in a short form
hand that over themselves (``layers.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from poseidon.engine.engine import Engine
from poseidon.engine.layers import HeadCall, restore, specialise
from poseidon.errors import UnsupportedError
from poseidon.planning.planner import Plan
from poseidon.routes.base import LiveUnit


class Turns(Protocol):
    """Receiver of a backward's beginning and end: the engine itself, or an intermediary."""

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> object:
        """Start an exchange unless one is under way; ``unused`` get no gradient."""

    def end_backward(self) -> None:
        """End the backward: no more gradients come."""

    def close(self) -> None:
        """Shut the exchange down."""


class AutogradFrontEnd:
    """Connects the autograd graph of one model to one engine."""

    def __init__(
        self, engine: Engine, turns: Turns | None = None, check_parameters: Callable[[], object] | None = None
    ) -> None:
        self.engine = engine
        self.turns: Turns = turns or engine
        self._check_parameters = check_parameters
        """Raises if the model has other parameters than the engine."""
        self._nodes: dict[nn.Parameter, Node] = {}
        self._handles: list[RemovableHandle] = []
        self._unused: set[nn.Parameter] = set()
        self._is_due = False
        """There was a forward since the last backward."""
        self._followed: Plan | None = None
        self._is_end_queued = False
        self._is_closed = False
        self._elsewhere: dict[nn.Parameter, bool] = {}
        """Parameters that the backward under way has reached, though it has not passed through the model's outputs, or
        not yet; and whether their gradients held those of an earlier backward without an exchange."""
        self._has_starts = True
        self._head_calls: dict[int, weakref.WeakSet[HeadCall]] = {}
        """By unit: forwards of its head whose backward may still come."""
        for unit in engine.units:
            for parameter in unit.parameters:
                self._watch(parameter)
        self._kinds = {parameter: (parameter.dtype, parameter.device) for parameter in self._nodes}
        for unit in engine.units:
            if unit.spec.kind != "dense":
                specialise(unit, self)

    def watch_outputs(
        self, tensors: Iterable[Tensor], unused: Iterable[nn.Parameter], hides_some: bool = False
    ) -> None:
        """Watch the backward that will start from these outputs of the model; it does not reach ``unused``.

        ``hides_some``: there may be others, inside objects that cannot be searched.
        """
        # A backward may pass through several forwards: what any of them uses may get a gradient.
        self._unused = self._unused & set(unused) if self._is_due else set(unused)
        self._is_due = True
        self._is_end_queued = False
        if self._elsewhere and torch._C._current_graph_task_id() == -1:
            self._elsewhere = {}  # of a backward that an error has ended
        starts = [tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is not None]
        self._has_starts = bool(starts) and not hides_some
        for tensor in starts:
            tensor.register_hook(self._output_gradient)

    def begin(self, early: Collection[nn.Parameter] = ()) -> None:
        """Start the exchange of this backward unless it has started, and schedule its end.

        ``early``: parameters whose gradients of this backward are in ``.grad`` already.
        """
        if self._elsewhere:
            self._begin_with_early(early)
        else:
            if early:
                self.engine.expect_early(early)
            self.turns.begin_backward(self._unused)
        self._queue_end()

    def _begin_with_early(self, others: Collection[nn.Parameter]) -> None:
        """Start the exchange with gradients that came before this backward passed through the model's outputs.

        A loss may use a parameter beside them, such as a temperature. It will not come again.
        """
        reached, self._elsewhere = self._elsewhere, {}
        self.engine.forget_local(parameter for parameter, was_local in reached.items() if not was_local)
        self._unused = self._unused - set(reached)
        self.engine.expect_early({*reached, *others})
        self.turns.begin_backward(self._unused)
        self._report(reached)

    def _report(self, reached: Collection[nn.Parameter]) -> None:
        """Report gradients that came before the exchange began, in one order on all workers."""
        for parameter in reversed([one for one in self._nodes if one in reached]):
            self.engine.parameter_ready(parameter, is_dense=True)

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward of the model's outputs is under way."""
        return self._is_end_queued or self.engine.in_backward

    @property
    def exchanges(self) -> bool:
        """Whether the backward under way exchanges gradients.

        It does if it passes through outputs of an armed forward, or if that forward's outputs are inside objects that
        cannot be searched. A backward that starts elsewhere (for example, from a penalty on the weights) stays local.
        """
        return self.engine.is_armed and (self._is_end_queued or not self._has_starts)

    def will_accumulate(self, parameter: nn.Parameter) -> bool:
        """Whether this backward accumulates into ``parameter.grad`` instead of returning gradients to the caller."""
        try:
            return bool(torch._C._will_engine_execute_node(self._nodes[parameter]))
        except RuntimeError:  # torch.autograd.grad() asks for this very parameter
            return False

    def expect_head(self, unit: LiveUnit) -> HeadCall:
        """Record a forward of a tied unit's head."""
        call = HeadCall()
        self._head_calls.setdefault(unit.index, weakref.WeakSet()).add(call)
        return call

    def is_last_head(self, unit: LiveUnit, call: HeadCall) -> bool:
        """Record the backward of such a forward; return whether no other is left that may come in this backward."""
        calls = self._head_calls[unit.index]
        calls.discard(call)
        return not calls

    def _end(self) -> None:
        self._is_end_queued = self._is_due = False
        if not self.engine.in_backward:
            return
        self.turns.end_backward()
        if self.engine.plan is not self._followed:
            self._follow_plan()

    def _follow_plan(self) -> None:
        """Keep the special forward only for layers whose route needs it; restore the others' own class."""
        self._followed = self.engine.plan
        short = self.engine.short_units
        for unit in self.engine.units:
            if unit.name in short:
                specialise(unit, self)
            else:
                restore(unit)

    def close(self) -> None:
        """Detach from the model and restore its layers and parameters."""
        self._is_closed = True
        for handle in self._handles:
            handle.remove()
        for unit in self.engine.units:
            restore(unit)

    def _watch(self, parameter: nn.Parameter) -> None:
        # The graph holds this node weakly; without our reference, a new one without the hook could replace it.
        node = get_gradient_edge(parameter).node
        self._nodes[parameter] = node
        self._handles.append(node.register_hook(self._accumulated(parameter)))

    def watch_again(self) -> None:
        """Watch parameters whose node was replaced, as when a model was moved to another device and back."""
        for parameter, kind in self._kinds.items():
            is_back = parameter.requires_grad and (parameter.dtype, parameter.device) == kind
            if is_back and get_gradient_edge(parameter).node is not self._nodes[parameter]:
                self._watch(parameter)

    def _accumulated(self, parameter: nn.Parameter) -> Callable[..., None]:
        front_end = weakref.ref(self)
        number = self.engine.number_of(parameter)

        def accumulated(_: Any, gradients: tuple[Tensor | None, ...]) -> None:
            self = front_end()
            if self is None:
                return
            engine, is_dense = self.engine, gradients[0] is not None
            # What is true of nearly all gradients comes first: their backward is under way.
            if engine.is_armed and self._is_end_queued and engine.gradient_ready(number, is_dense):
                return
            if not self.exchanges:
                if engine.is_armed and self._is_due:
                    self._note_elsewhere(parameter)
                engine.local_gradient(parameter)
                return
            self.begin({parameter})
            engine.parameter_ready(parameter, is_dense)

        return accumulated

    def _note_elsewhere(self, parameter: nn.Parameter) -> None:
        """Note a gradient of a backward that has not passed through the outputs of the last forward."""
        if not self._elsewhere:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_elsewhere)
        self._elsewhere.setdefault(parameter, self.engine.is_local(parameter))

    def _end_elsewhere(self) -> None:
        """Exchange the gradients of such a backward if it reached all parameters, as one of the model's own does.

        So it is if the loss is computed from what the model keeps besides its outputs. A penalty on all weights is
        exchanged then too, which changes nothing; one on some of them leaves with the next backward.
        """
        reached, self._elsewhere = self._elsewhere, {}
        expected = {parameter for parameter in self._nodes if parameter.requires_grad} - self._unused
        if self._is_due and self.engine.is_armed and not self.is_in_backward and reached.keys() >= expected:
            self.turns.begin_backward(self._unused)
            self._report(reached)
            self._end()

    def _output_gradient(self, _: Tensor) -> None:
        if self._is_closed:
            raise UnsupportedError(
                f"rank {self.engine.team.rank}: backward of a model whose wrapper was closed, or dropped, after its "
                "forward, so that the gradients would stay on this worker. Keep the wrapper in a variable until "
                "backward() has returned"
            )
        # The forward of this output was armed, and that decides; one under no_sync() may have followed it.
        self.engine.is_armed = True
        # Queued here, in the outermost backward: re-entrant checkpoints run nested ones, which end too early.
        self._queue_end()
        # Not if torch.autograd.grad() only passes through. (If checkpoints hide all parameters
        # from this backward, the first of their gradients begins the exchange.)
        if any(self.will_accumulate(parameter) for parameter in self._nodes):
            self.begin()
        else:
            self.engine.is_bypassed = True
            self._check_watched()

    def _check_watched(self) -> None:
        """Raise if the model's parameters are no longer those that are watched: every worker would train alone."""
        if self._check_parameters is not None:
            self._check_parameters()
        for unit in self.engine.units:
            for parameter in unit.parameters:
                if parameter.requires_grad and get_gradient_edge(parameter).node is not self._nodes[parameter]:
                    before = " on ".join(map(str, self._kinds[parameter]))
                    raise UnsupportedError(
                        f"rank {self.engine.team.rank}: the parameters of {unit.name} were {before} when the model was "
                        f"distributed and are {parameter.dtype} on {parameter.device} now, so that their gradients "
                        "would stay on this worker. Convert or move a model before it is distributed"
                    )

    def _queue_end(self) -> None:
        if not self._is_end_queued:
            self._is_end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
