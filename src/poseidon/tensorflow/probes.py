"""Trials of a graph with parts of a batch: how fetched numbers and assigned variables depend on the batch's rows.

A trial computes values and runs no assignment, exchange or other side effect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from poseidon.tensorflow.combining import ANY, fitting
from poseidon.tensorflow.graphs import ASSIGNMENTS, HOLDING, find_ancestors, holder_of, rests_on_variables

Array = np.ndarray[Any, Any]

_ADDING = {
    "AssignAdd": 1,
    "AssignAddVariableOp": 1,
    "ScatterAdd": 1,
    "ResourceScatterAdd": 1,
    "AssignSub": -1,
    "AssignSubVariableOp": -1,
    "ScatterSub": -1,
    "ResourceScatterSub": -1,
}
_HARMLESS = ("Assert", "Print", "Random", "Stateless", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial")


@dataclass(frozen=True, eq=False)
class Assignment:
    """The one operation of a run that assigns a variable."""

    variable: Any
    operation: Any

    @property
    def is_constant(self) -> bool:
        """Whether the new value depends on variables only, and so is the same on all workers."""
        return all(map(rests_on_variables, self.sources))

    @property
    def is_added(self) -> bool:
        """Whether it adds to the variable, whatever that holds."""
        return self.operation.type in _ADDING

    @property
    def sources(self) -> list[Any]:
        """The tensors that determine the new value, besides the old one."""
        return list(self.operation.inputs)[1:]

    def change(self, old: Array, found: Sequence[Array]) -> Array:
        """Return what the assignment adds to the old value, given the values of :attr:`sources`."""
        sign = _ADDING.get(self.operation.type)
        if sign is None:
            return np.asarray(found[0]) - old
        if len(found) == 1:
            return sign * np.asarray(found[0])
        change = np.zeros_like(old)
        np.add.at(change, found[0], found[1])
        return sign * change


def find_assignments(variables: Sequence[Any], operations: Mapping[str, Any]) -> list[Assignment]:
    """Return the assignments of variables that one operation of a run assigns, and that a trial can follow."""
    made: dict[str, list[Any]] = {}
    for operation in operations.values():
        if operation.type in ASSIGNMENTS:
            made.setdefault(holder_of(operation.inputs[0]).name, []).append(operation)
    return [
        Assignment(variable, made[variable.op.name][0])
        for variable in variables
        if len(made.get(variable.op.name, ())) == 1
    ]


def can_be_tried(tensors: Sequence[Any], fed: Collection[str]) -> bool:
    """Return whether tensors can be computed without any effect, given those that are fed."""
    graph = tensors[0].graph if tensors else None
    if graph is None or not all(graph.is_fetchable(tensor) for tensor in tensors):
        return False
    return not any(
        operation.type in ASSIGNMENTS
        or (
            operation.op_def is not None
            and operation.op_def.is_stateful
            and operation.type not in HOLDING
            and not operation.type.startswith(_HARMLESS)
        )
        for operation in find_ancestors(tensors, fed).values()
    )


@dataclass(frozen=True)
class BatchRows:
    """A batch by the names of tensors: values that can be cut by rows, and others that are fed with them."""

    values: Mapping[str, Array]
    others: Mapping[str, Any]

    @property
    def count(self) -> int:
        """The number of rows; 0 if they differ."""
        lengths = {len(value) for value in self.values.values()}
        return lengths.pop() if len(lengths) == 1 else 0

    def cut(self, part: slice) -> dict[str, Any]:
        """Return what to feed for some of the rows."""
        return {**self.others, **{name: value[part] for name, value in self.values.items()}}


def try_parts(
    session: Any, batch: BatchRows, assignments: Sequence[Assignment], fetched: Sequence[Any]
) -> tuple[list[int], list[int]]:
    """Return the ways in which parts of a batch make up each assignment's change, and each fetched number."""
    if batch.count < 2:
        return [ANY] * len(assignments), [ANY] * len(fetched)
    first = max(1, batch.count // 3)
    wanted = [[one.variable, *one.sources] for one in assignments]
    found = []
    for part in (slice(None), slice(first), slice(first, None)):
        olds, values = session.run([wanted, list(fetched)], batch.cut(part))
        changes = [one.change(np.asarray(old), rest) for one, (old, *rest) in zip(assignments, olds, strict=True)]
        found.append((changes, values))
    counts = first, batch.count - first
    ways = [
        [fitting(whole, (left, right), counts) for whole, left, right in zip(*columns, strict=True)]
        for columns in zip(*found, strict=True)
    ]
    return ways[0], ways[1]
