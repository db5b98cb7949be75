"""Which parameters a function multiplies with or looks up, and the same function with these uses tapped.

A traced function is a list of operations. Where one multiplies by a parameter (``x @ kernel``, as dense layers of all
libraries do) the product's backward can hand over its factors instead of the kernel's gradient; where one gathers rows
of a parameter (``table[numbers]``), the rows. Uses inside loops, in another type or in another way stay as they are:
their gradient arrives in full, beside the short form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from poseidon.jax.callbacks import HostCallbacks
from poseidon.team.team import Team
from poseidon.units import Kind

_KINDS: tuple[Kind, ...] = ("linear", "embedding")
_WORTH = 2
"""How much smaller than the gradient a short form must be to be handed over."""


def trace_function(function: Callable[[Any], Any], params: Any) -> tuple[Any, Any]:
    """Return the operations of a function of the parameters, and the structure of its result."""
    traced, shape = jax.make_jaxpr(function, return_shape=True)(params)
    return traced, jax.tree.structure(shape)


@dataclass(frozen=True)
class ShortForm:
    """How a parameter is used, if in one way only."""

    kind: Kind
    values: int
    """Values in the short form of its gradient."""


def find_forms(traced: Any) -> dict[int, ShortForm]:
    """Return which parameters, by position, have a short form."""
    values: dict[int, int] = {}
    kinds: dict[int, set[Kind]] = {}
    for position, kind, weight, count in _uses(traced.jaxpr, dict(enumerate(traced.jaxpr.invars))):
        kinds.setdefault(position, set()).add(kind)
        rows, width = weight.shape
        values[position] = values.get(position, 0) + count * (rows + width if kind == "linear" else width)
    return {position: ShortForm(kind.pop(), values[position]) for position, kind in kinds.items() if len(kind) == 1}


def agree_on_forms(
    team: Team, found: Mapping[int, ShortForm], sizes: Sequence[int], forced: Collection[int]
) -> dict[int, Kind]:
    """Return the forms that the workers use, equal on all: much smaller than the gradient, or forced. Collective."""
    words: list[int] = []
    for position in range(len(sizes)):
        form = found.get(position)
        words += [-1, 0] if form is None else [_KINDS.index(form.kind), form.values]
    rows = team.gather_ints(words, "the uses of the parameters")
    agreed: dict[int, Kind] = {}
    for position, size in enumerate(sizes):
        kinds = {row[2 * position] for row in rows}
        mean = sum(row[2 * position + 1] for row in rows) / len(rows)
        if len(kinds) == 1 and kinds != {-1} and (position in forced or mean * _WORTH <= size):
            agreed[position] = _KINDS[kinds.pop()]
    return agreed


def run_tapped(traced: Any, leaves: Sequence[Any], host: HostCallbacks, tapped: Collection[int]) -> list[Any]:
    """Run a traced function with the ``tapped`` parameters' uses tapped; return the leaves of its result."""
    places = {id(variable): position for position, variable in enumerate(traced.jaxpr.invars)}
    return _run(traced.jaxpr, traced.consts, leaves, places, host, tapped)


def _uses(jaxpr: Any, parameters: Mapping[int, Any]) -> Iterator[tuple[int, Kind, Any, int]]:
    """Yield position, kind, shape and number of rows for each use that can be tapped."""
    places = {id(variable): position for position, variable in parameters.items()}
    for equation in jaxpr.eqns:
        if (inner := _inner(equation)) is not None:
            passed = zip(equation.invars, inner.jaxpr.invars, strict=True)
            yield from _uses(inner.jaxpr, {places[id(a)]: b for a, b in passed if id(a) in places})
        elif (use := _use_of(equation, places)) is not None:
            position, kind = use
            weight = equation.invars[1 if kind == "linear" else 0].aval
            other = equation.invars[0 if kind == "linear" else 1].aval
            yield position, kind, weight, math.prod(other.shape[:-1])


def _inner(equation: Any) -> Any:
    """Return the operations of a call that can be run in its place."""
    return equation.params["jaxpr"] if equation.primitive.name in ("jit", "pjit") else None


def _use_of(equation: Any, places: Mapping[int, int]) -> tuple[int, Kind] | None:
    name, operands = equation.primitive.name, equation.invars
    if name == "dot_general" and (position := places.get(id(operands[1]))) is not None:
        return (position, "linear") if _is_product(equation) else None
    if name == "gather" and (position := places.get(id(operands[0]))) is not None:
        return (position, "embedding") if _is_look_up(equation) else None
    return None


def _is_product(equation: Any) -> bool:
    x, kernel = (operand.aval for operand in equation.invars)
    contracted, batch = equation.params["dimension_numbers"]
    return (
        kernel.ndim == 2
        and x.ndim >= 2
        and (*map(tuple, contracted), *map(tuple, batch)) == ((x.ndim - 1,), (0,), (), ())
        and equation.params["precision"] is None
        and x.dtype == kernel.dtype == equation.outvars[0].aval.dtype
    )


def _is_look_up(equation: Any) -> bool:
    table, numbers = (operand.aval for operand in equation.invars)
    how, mode = equation.params["dimension_numbers"], str(equation.params["mode"])
    return (
        table.ndim == 2
        and tuple(equation.params["slice_sizes"]) == (1, table.shape[1])
        and how.offset_dims == (numbers.ndim - 1,)
        and (how.collapsed_slice_dims, how.start_index_map) == ((0,), (0,))
        and not getattr(how, "operand_batching_dims", ())
        and ("FILL" in mode or "PROMISE" in mode or "drop" in mode)
    )


def _run(
    jaxpr: Any,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    places: Mapping[int, int],
    host: HostCallbacks,
    tapped: Collection[int],
) -> list[Any]:
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
    for equation in jaxpr.eqns:
        operands = [one.val if isinstance(one, Literal) else values[one] for one in equation.invars]
        inner, use = _inner(equation), _use_of(equation, places)
        if inner is not None:
            passed = zip(equation.invars, inner.jaxpr.invars, strict=True)
            within = {id(b): places[id(a)] for a, b in passed if id(a) in places}
            results: Sequence[Any] = _run(inner.jaxpr, inner.consts, operands, within, host, tapped)
        elif use is not None and use[0] in tapped:
            results = [_tapped(equation, operands, use, host)]
        else:
            results = _run_plain(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [one.val if isinstance(one, Literal) else values[one] for one in jaxpr.outvars]


def _run_plain(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    options = equation.primitive.get_bind_params(equation.params)
    # Older versions give functions beside the options.
    functions, options = options if isinstance(options, tuple) else ((), options)
    with equation.ctx.manager:
        found = equation.primitive.bind(*functions, *operands, **options)
    return found if equation.primitive.multiple_results else [found]


def _tapped(equation: Any, operands: Sequence[Any], use: tuple[int, Kind], host: HostCallbacks) -> Any:
    position, kind = use
    if kind == "linear":
        return host.multiply(position, *operands)
    table, numbers = operands

    def find(table: Any, numbers: Any) -> Any:
        return equation.primitive.bind(table, numbers[..., None], **equation.params)

    return host.look_up(position, table, jnp.squeeze(numbers, -1), table.dtype, find)
