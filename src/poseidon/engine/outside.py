"""The front end for frameworks with their own autograd, such as TensorFlow and JAX.

It speaks numpy: gradients come in as arrays, means go out as arrays, and nothing here depends on the framework. The
engine's parameters are placeholders with a shape and a dtype but no storage.

One step, the same on every worker::

    begin(samples)                                  before or during forward
    give / give_factors / give_rows / leave_out     once per variable, as its gradient becomes final; any thread
    finish()                                        blocks until all means have arrived
    mean(position)                                  once per variable
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from poseidon.engine.assemble import ExchangeOptions, assemble_engine
from poseidon.engine.engine import Engine
from poseidon.engine.options import Options
from poseidon.errors import ConfigError, MismatchError, UnsupportedError
from poseidon.planning.planner import Plan, check_overrides
from poseidon.routes import standard_routes
from poseidon.routes.base import LiveUnit
from poseidon.routes.room import share_filled
from poseidon.team.agree import check_same_model
from poseidon.team.mail import Tag
from poseidon.team.mirror import mirror_all
from poseidon.team.team import Team
from poseidon.units import Kind, Load, ParameterSpec, Unit

Array = np.ndarray[Any, Any]

_TYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


NO_STEP = -1
"""Sent in place of a sample count by a worker that expects no further step."""


@dataclass(frozen=True)
class OutsideVariable:
    """A trainable variable of another framework."""

    name: str
    """Equal on all workers; used in errors."""
    shape: tuple[int, ...]
    dtype: str
    """Name of a floating-point type: float16, bfloat16, float32, float64."""


@dataclass(frozen=True)
class OutsideUnit:
    """Variables that travel together, as positions in the list of all variables."""

    name: str
    kind: Kind
    """``linear``: one variable of shape (inputs, outputs), as Keras and TensorFlow lay out kernels. ``embedding``: one
    table whose rows are looked up."""
    positions: tuple[int, ...]
    is_sparse: bool = False
    """Embedding: return the mean as rows too, so that a full gradient of the table never exists."""


@dataclass(frozen=True)
class Rows:
    """A gradient that is zero except in some rows: their numbers, ascending and distinct, and their values."""

    numbers: Array
    values: Array


def check_alike(team: Team, variables: Sequence[OutsideVariable]) -> None:
    """Raise :class:`~poseidon.errors.MismatchError`, naming the first difference, unless all models agree."""
    check_same_model(team, [[v.name, list(v.shape), v.dtype, True, []] for v in variables])


def take_from_first(team: Team, arrays: Sequence[Array], what: str = "the initial state") -> list[Array]:
    """Return worker 0's arrays; all workers pass arrays of the same shapes and types. Collective."""
    copies = [np.array(array, order="C") for array in arrays]
    mirror_all(team, [_as_bytes(copy) for copy in copies if copy.nbytes], 0, what)
    return copies


def end_steps(team: Team) -> None:
    """Raise :class:`~poseidon.errors.MismatchError` if another worker has begun one more step. Collective."""
    counts = [row[0] for row in team.gather_ints([NO_STEP], "the others to end their epoch")]
    if any(count != NO_STEP for count in counts):
        step_weight(NO_STEP, counts)


class OutsideFrontEnd:
    """Exchanges the gradients of variables that live in another framework.

    Construction is collective. Gradients are weighted by sample count, so the mean equals that of one worker with all
    samples in one batch, however unevenly the samples are distributed.
    """

    def __init__(
        self,
        team: Team,
        variables: Sequence[OutsideVariable],
        units: Sequence[OutsideUnit],
        options: ExchangeOptions | None = None,
        weigh: Callable[[], float] | None = None,
    ) -> None:
        """``weigh`` returns :attr:`weight`, where the caller counts the samples of all workers itself."""
        options = options or ExchangeOptions()
        self.team = team
        self._weigh = weigh
        self._variables = list(variables)
        self._parameters = [_mirror(variable) for variable in variables]
        self._units = [self._make_unit(number, unit) for number, unit in enumerate(units)]
        self._unit_at = {position: self._units[n] for n, unit in enumerate(units) for position in unit.positions}
        check_overrides([unit.spec for unit in self._units], dict(options.routes or {}), standard_routes())
        settings = Options(keep_views=True, routes=options.routes)
        self._engine = assemble_engine(self._units, team, torch.device("cpu"), settings, options.cluster)
        self._lock = threading.Lock()
        self._samples = 0
        self._counts: Any = None
        self._weight = 1.0

    @property
    def plan(self) -> Plan | None:
        """The routes in force; None before the end of the first step."""
        return self._engine.plan

    @property
    def engine(self) -> Engine:
        """The engine behind it."""
        return self._engine

    def shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of a variable."""
        return self._variables[position].shape

    def begin(self, samples: int, unused: Collection[int] = ()) -> None:
        """Start a step to which this worker contributes ``samples`` samples; never blocks.

        With 0 samples the worker takes part only so that the others can proceed: its gradients do not count. ``unused``
        are positions to :meth:`leave_out`.
        """
        self._samples = samples
        if self._weigh is None:
            self._counts = self.team.start_gather([samples])
        for unit in self._units:
            if unit.spec.kind != "dense":
                unit.weight.grad = None
        self._engine.arm(True, samples, samples)
        self._engine.begin_backward()
        for position in unused:
            self.leave_out(position)

    def leave_out(self, position: int) -> None:
        """Mark a variable as having no gradient on any worker in this step, instead of giving one."""
        parameter = self._parameters[position]
        parameter.grad = None
        self._engine.parameter_ready(parameter)

    @property
    def weight(self) -> float:
        """Factor of this worker's gradients in this step; blocks until every worker has begun it."""
        if self._weigh is not None:
            return self._weigh()
        with self._lock:
            if self._counts is not None:
                counts = [row[0] for row in self._counts("the others to begin the step")]
                self._counts = None
                self._weight = step_weight(self._samples, counts)
            return self._weight

    def give(self, position: int, gradient: Array) -> None:
        """Hand over a full gradient; copies the array."""
        parameter, weight = self._parameters[position], self.weight
        source = as_tensor(gradient)
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        if weight == 1.0:
            parameter.grad.copy_(source)
        elif not weight:
            parameter.grad.zero_()  # not times 0: a mean over no samples is no number
        else:
            torch.mul(source, weight, out=parameter.grad)
        self._engine.parameter_ready(parameter, is_dense=True)

    def give_factors(self, position: int, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Hand over a linear unit's inputs (K x N) and output gradients (K x M), one pair per call; copies them."""
        unit, weight = self._unit_at[position], self.weight
        is_short = self._engine.collects(unit)
        total = torch.zeros(() if is_short else unit.weight.shape, dtype=unit.weight.dtype, device="cpu")
        for x, g in pairs:
            rows, gradient = as_tensor(x), as_tensor(g)
            if not weight:
                rows, gradient = torch.zeros_like(rows), torch.zeros_like(gradient)
            elif weight != 1.0:
                gradient = gradient * weight
            if self._engine.is_observing:
                filled = share_filled(rows, gradient)
                self._engine.observe(unit, Load(rows.shape[0], rows.element_size(), filled=filled))
            if is_short:
                # The kernel is inputs x outputs, the transpose of the engine's layout, so the factors swap.
                self._engine.give(unit, gradient, rows)
            else:
                total.addmm_(rows.t().to(total.dtype), gradient.to(total.dtype))
        if not is_short:
            unit.weight.grad = total
        self._engine.parameter_ready(unit.weight, is_dense=not is_short)

    def give_rows(self, position: int, numbers: Array, values: Array) -> None:
        """Hand over the rows of an embedding's gradient; numbers may repeat; copies the arrays."""
        unit, weight = self._unit_at[position], self.weight
        where = as_tensor(numbers).reshape(-1).long()
        rows = as_tensor(values).reshape(-1, unit.weight.shape[1])
        if weight != 1.0:
            rows = rows * weight if weight else torch.zeros_like(rows)
        if self._engine.is_observing:
            self._engine.observe(unit, Load(torch.unique(where).numel()))
        is_short = unit.spec.is_sparse or self._engine.makes_rows(unit)
        if is_short:
            shape = unit.weight.shape
            unit.weight.grad = torch.sparse_coo_tensor(where.unsqueeze(0), rows, shape, check_invariants=False)
        else:
            unit.weight.grad = torch.zeros(unit.weight.shape, dtype=unit.weight.dtype, device="cpu").index_add_(
                0, where, rows
            )
        self._engine.parameter_ready(unit.weight, is_dense=not is_short)

    def finish(self) -> None:
        """Wait until the means of all variables have arrived."""
        self._engine.end_backward()

    def mean(self, position: int) -> Array | Rows:
        """Return the mean of the finished step; :class:`Rows` for a sparse unit if every worker gave rows.

        Call once per step: the caller owns the returned array.
        """
        parameter, dtype = self._parameters[position], self._variables[position].dtype
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            return Rows(gradient.indices()[0].numpy(), _as_array(gradient.values(), dtype))
        if gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size():
            # Part of a bucket, which the next step overwrites; a framework may use the array as a variable's memory.
            return _as_array(gradient.clone(memory_format=torch.contiguous_format), dtype)
        parameter.grad = None
        return _as_array(gradient, dtype)

    def detach(self) -> None:
        """Stop the background threads; the team stays open."""
        self._engine.detach()

    def close(self) -> None:
        """Stop the background threads, including the team's."""
        self._engine.close()

    def _make_unit(self, number: int, unit: OutsideUnit) -> LiveUnit:
        if unit.kind != "dense" and (len(unit.positions) != 1 or len(self._variables[unit.positions[0]].shape) != 2):
            raise ConfigError(
                f"unit {unit.name}: a {unit.kind} unit must be one matrix, not {len(unit.positions)} variables"
            )
        parameters = tuple(self._parameters[position] for position in unit.positions)
        specs = tuple(
            ParameterSpec(self._variables[position].name, self._variables[position].shape, p.element_size())
            for position, p in zip(unit.positions, parameters, strict=True)
        )
        return LiveUnit(number, Unit(unit.name, unit.kind, specs, unit.is_sparse), None, parameters)


class SummingChannel:
    """Small blocking sums in the middle of a step, such as the moments of a batch, on a separate channel.

    Calls must come in the same order on all workers. Construction is collective.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._channel = team.mail.new_channel()
        self._numbers = itertools.count()

    def sum(self, array: Array, what: str) -> Array:
        """Return the sum of all workers' arrays, bit-identical everywhere. Blocks."""
        mine = np.array(array, order="C")
        data = mine.reshape(-1).view(np.uint8).data
        parts = self._team.exchange(data, what, Tag(self._channel, next(self._numbers)))
        # All workers add in rank order.
        total, *others = (np.frombuffer(part, mine.dtype).reshape(mine.shape) for part in parts)
        for other in others:
            total = total + other
        return total


def as_tensor(array: Array) -> Tensor:
    """Return a tensor that shares the array's memory, which the caller keeps alive; copies only strided arrays."""
    array = np.asarray(array, order="C")
    if array.dtype.name == "bfloat16":
        return as_tensor(array.view(np.int16)).view(torch.bfloat16)
    if not array.flags.writeable:
        # torch warns about read-only arrays. Nothing writes here, and a copy could be large.
        memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
        return torch.from_numpy(np.frombuffer(memoryview(memory).cast("B"), array.dtype).reshape(array.shape))
    return torch.from_numpy(array)


def _as_bytes(array: Array) -> Tensor:
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


def _as_array(tensor: Tensor, dtype: str) -> Array:
    if dtype == "bfloat16":
        return tensor.view(torch.int16).numpy().view(np.dtype("bfloat16"))
    return tensor.numpy()


def _mirror(variable: OutsideVariable) -> nn.Parameter:
    if variable.dtype not in _TYPES:
        raise UnsupportedError(
            f"{variable.name} has type {variable.dtype}; gradients of {', '.join(_TYPES)} can be averaged"
        )
    # One value, expanded: only shape and dtype matter here, the data stays in the framework.
    return nn.Parameter(torch.empty((), dtype=_TYPES[variable.dtype], device="cpu").expand(variable.shape))


def step_weight(mine: int, counts: Sequence[int]) -> float:
    """Return n_mine * workers / n_all, the factor that turns the mean over workers into one over samples. Pure."""
    done = [rank for rank, count in enumerate(counts) if count == NO_STEP]
    if done:
        busy = next(rank for rank in range(len(counts)) if rank not in done)
        raise MismatchError(
            f"worker {done[0]} has ended its epoch while worker {busy} has a batch left; give all workers "
            "the same number of batches, and stop only at the end of an epoch"
        )
    total = sum(counts)
    if total == 0:
        raise UnsupportedError("no worker has a sample in this step; give at least one worker a batch")
    return 1.0 if len(set(counts)) == 1 else mine * len(counts) / total
