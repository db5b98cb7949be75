"""Keras on torch: gradients travel during backward, through the same autograd hooks as those of torch models."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import keras
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poseidon.engine.assemble import assemble_engine
from poseidon.engine.engine import Engine
from poseidon.engine.hooks import AutogradFrontEnd
from poseidon.engine.moments import MomentsExchange, differentiate
from poseidon.engine.options import Options
from poseidon.engine.outside import OutsideUnit
from poseidon.errors import UnsupportedError
from poseidon.keras.backend import Backend, KerasExchange, Setup, refuse_own_loop
from poseidon.keras.batches import count_rows, unpack
from poseidon.keras.moments import replace_moments
from poseidon.keras.step_share import StepWeight, weighing_means
from poseidon.keras.taps import Tap, find_short_layers, tap
from poseidon.planning.planner import Plan, check_overrides
from poseidon.routes import standard_routes
from poseidon.routes.base import LiveUnit
from poseidon.routes.room import share_filled
from poseidon.units import Kind, Load, ParameterSpec, Unit

log = logging.getLogger("poseidon.keras")


def make_backend(model: Any) -> Backend:  # noqa: ARG001 - torch treats all models alike
    """Return the backend for a compiled model."""
    return TorchBackend()


class TorchBackend:
    """Keras' torch backend."""

    forms: frozenset[Kind] = frozenset(("linear", "embedding"))
    has_sparse_means = False
    timing = "during backward"

    def check(self, model: Any) -> None:
        """Turn off what the hooks do not support."""
        if model.jit_compile:
            log.warning("jit_compile is turned off: a compiled train step does not call gradient hooks")
            model.jit_compile = False

    def build(self, model: Any, batch: Any) -> None:
        """Create a model's variables, as Keras does it."""
        model._symbolic_build(data_batch=batch)

    def attach(self, setup: Setup) -> KerasExchange:
        """Put hooks on the variables. Collective."""
        return TorchExchange(setup)


class TorchExchange:
    """The exchange of one model's gradients: hooks on its variables, and on the products in its Dense layers."""

    error: BaseException | None = None

    def __init__(self, setup: Setup) -> None:
        self._model = setup.model
        self._weight = StepWeight(setup.team)
        self._engine = _make_engine(setup)
        self._front = AutogradFrontEnd(self._engine, turns=self)
        self._parameters: list[nn.Parameter] = [p for unit in self._engine.units for p in unit.parameters]
        # Weight gradients at the parameters, not through the loss: a custom train_step computes its own loss.
        self._handles = [parameter.register_hook(self._weighted) for parameter in self._parameters]
        self._layers = find_short_layers(setup)
        for number, layer in self._layers.items():
            tap(layer, self._tap(layer, self._engine.units[number]))
        self._synchronized = setup.synchronized
        self._row_weight: float | None = None
        """How many samples one row of the batch counts for; None outside a step."""
        if setup.moments is not None:
            self._moments = MomentsExchange(setup.team, setup.moments, self._weight.get)
        for layer in self._synchronized:
            replace_moments(layer, self._combined)
        self._train_step = setup.model.train_step
        self._has_own_step = "train_step" in vars(setup.model)
        setup.model.train_step = self._step
        self._optimizer = setup.model.optimizer
        self._apply = self._optimizer.apply
        self._optimizer.apply = self._apply_in_step

    @property
    def plan(self) -> Plan | None:
        """The routes in force; None before the end of the first step."""
        return self._engine.plan

    @property
    def share(self) -> float:
        """The part of this worker in the samples of the last step."""
        return self._weight.share

    def detach(self) -> None:
        """Restore model, layers and optimizer."""
        for handle in self._handles:
            handle.remove()
        for layer in self._layers.values():
            del layer.call
        for layer in self._synchronized:
            del layer._moments
        if self._has_own_step:
            self._model.train_step = self._train_step
        else:
            del self._model.train_step
        del self._optimizer.apply
        self._front.close()
        self.close()

    # What the model calls in a step, in this order.

    def _step(self, data: Any) -> Any:
        """Stand in for ``model.train_step``."""
        data, packed = unpack(data)
        rows = count_rows(data)
        samples = rows if packed is None else int(packed[0])
        self._row_weight = samples / rows
        self._weight.begin(samples)
        self._engine.arm(True, samples, samples)
        self._front.watch_outputs((), ())
        before = [] if samples else [v.value.detach().clone() for v in self._model.metrics_variables]
        step = self._engine.step
        with weighing_means(lambda: self._weight.share):
            logs = self._train_step(data)
        # Backward passes outside a train step are not exchanged.
        self._engine.is_armed, self._row_weight = False, None
        if self._engine.step == step:
            raise UnsupportedError(
                f"the train_step of {type(self._model).__name__} did not call backward() on a loss of its variables, "
                "so its gradients cannot be intercepted; let autograd compute them"
            )
        # A batch that does not count must leave no trace. Metrics created in this step come after the others.
        for variable, value in zip(self._model.metrics_variables, before, strict=False):
            variable.assign(value)
        return logs

    def _apply_in_step(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``optimizer.apply``, which a loop of one's own would call with this worker's gradients."""
        if self._row_weight is None:
            refuse_own_loop(self._model)
        return self._apply(*args, **kwargs)

    def _combined(self, mean: Tensor, variance: Tensor, count: Any, name: str) -> tuple[Tensor, Tensor]:
        if self._row_weight is None:  # the user's own call, which the other workers may not make
            return mean, variance
        function: Any = _CombinedMoments
        found: tuple[Tensor, Tensor] = function.apply(
            mean, variance, float(count) * self._row_weight, self._moments, name
        )
        return found

    # What the hooks call when a backward begins and ends.

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> bool:
        """Start the exchange if it has not begun; parameters out of backward's reach get no gradient, as in Keras."""
        if self._engine.in_backward:
            return False
        unused = [parameter for parameter in self._parameters if not self._front.will_accumulate(parameter)]
        return self._engine.begin_backward(unused)

    def end_backward(self) -> None:
        """Wait for the means."""
        self._engine.end_backward()

    def close(self) -> None:
        """End the engine's threads; the team goes on."""
        self._engine.detach()

    def _weighted(self, gradient: Tensor | None) -> Tensor | None:
        """Weight a gradient on its way into ``.grad``; it is None where factors were handed over."""
        weight = self._weight.get() if self._engine.is_armed else 1.0
        if gradient is None or weight == 1.0:
            return None
        return gradient * weight if weight else torch.zeros_like(gradient)

    def _tap(self, layer: Any, unit: LiveUnit) -> Tap:
        def product(inputs: Any) -> Any:
            if not self._is_followed(inputs):
                return None
            # Multiply as Keras does; float16 on the CPU is left to Keras, which widens and narrows it.
            dtype = keras.backend.result_type(inputs.dtype, layer._kernel.value.dtype)
            if dtype == "float16" and inputs.device.type == "cpu":
                return None
            function: Any = _Product
            return function.apply(keras.ops.cast(inputs, dtype), unit.weight, self._front, unit, self._weight)

        def look_up(inputs: Any) -> Any:
            if not self._is_followed(inputs):
                return None
            numbers = inputs.long()
            numbers = torch.where(numbers < 0, numbers + layer.input_dim, numbers)
            if self._engine.is_observing:
                self._engine.observe(unit, Load(rows=torch.unique(numbers).numel()))
            return F.embedding(numbers, unit.weight, sparse=self._engine.makes_rows(unit))

        return product if unit.spec.kind == "linear" else look_up

    def _is_followed(self, inputs: Any) -> bool:
        # Keras infers shapes by running layers on the meta device.
        return isinstance(inputs, Tensor) and torch.is_grad_enabled() and not inputs.is_meta


class _Product(torch.autograd.Function):
    """The product of rows with a kernel (inputs x outputs), whose backward can hand over factors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kernel: Tensor,
        front: AutogradFrontEnd,
        unit: LiveUnit,
        weight: StepWeight,
    ) -> Tensor:
        ctx.save_for_backward(x, kernel)
        ctx.front, ctx.unit, ctx.weight = front, unit, weight
        return torch.matmul(x, kernel.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        front, unit, engine = ctx.front, ctx.unit, ctx.front.engine
        grad_x = g @ kernel.to(g.dtype).t() if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None, None, None
        rows_x, rows_g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        if front.will_accumulate(unit.weight):
            if front.exchanges:
                front.begin()
            if engine.is_observing and engine.in_backward:
                engine.observe(unit, Load(rows_x.shape[0], x.element_size(), filled=share_filled(x, g)))
            # Under create_graph the caller wants to differentiate once more, which factors cannot do.
            if engine.collects(unit) and not torch.is_grad_enabled():
                # The kernel is the transpose of what the engine takes: the factors swap.
                engine.give(unit, (rows_g * ctx.weight.get()).detach(), rows_x.detach())
                return grad_x, None, None, None, None
        return grad_x, (rows_x.t() @ rows_g).to(kernel.dtype), None, None, None


class _CombinedMoments(torch.autograd.Function):
    """Turns a worker's moments into those over all workers; its backward sums over all workers too."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, count: float, moments: MomentsExchange, name: str
    ) -> tuple[Tensor, Tensor]:
        whole_mean, whole_variance, ctx.share = moments.forward(_numpy(mean), _numpy(variance), count, name)
        ctx.moments, ctx.name = moments, name
        wholes = (torch.from_numpy(whole_mean).to(mean.device), torch.from_numpy(whole_variance).to(mean.device))
        ctx.save_for_backward(mean, wholes[0])
        return wholes

    @staticmethod
    def backward(ctx: Any, by_mean: Tensor, by_variance: Tensor) -> tuple[Tensor | None, ...]:
        mean, whole_mean = ctx.saved_tensors
        sums = ctx.moments.backward(_numpy(by_mean), _numpy(by_variance), ctx.name)
        by_whole_mean, by_whole_variance = (torch.from_numpy(total).to(mean.device) for total in sums)
        return *differentiate(by_whole_mean, by_whole_variance, mean, whole_mean, ctx.share), None, None, None


def _numpy(tensor: Tensor) -> Any:
    return tensor.detach().cpu().numpy()


def _make_engine(setup: Setup) -> Engine:
    units = [_live(number, unit, setup.variables) for number, unit in enumerate(setup.units)]
    check_overrides([unit.spec for unit in units], dict(setup.options.routes or {}), standard_routes())
    device = units[0].parameters[0].device
    options = Options(allow_unused=True, routes=setup.options.routes)
    return assemble_engine(units, setup.team, device, options, setup.options.cluster)


def _live(number: int, unit: OutsideUnit, variables: Any) -> LiveUnit:
    """Return a unit over the variables' own parameters."""
    mine = [variables[position] for position in unit.positions]
    parameters = tuple(variable._value for variable in mine)
    specs = tuple(
        ParameterSpec(variable.path, tuple(p.shape), p.element_size())
        for variable, p in zip(mine, parameters, strict=True)
    )
    return LiveUnit(number, Unit(unit.name, unit.kind, specs), None, parameters)
