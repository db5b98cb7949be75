"""Variables of a session: read, written, copied from worker 0, compared."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from poseidon.engine.outside import OutsideVariable, check_alike, take_from_first
from poseidon.errors import MismatchError
from poseidon.team.team import Team

Array = np.ndarray[Any, Any]


def describe(variable: Any) -> OutsideVariable:
    """Return the description of a variable that workers compare."""
    shape = variable.shape
    known = tuple(shape.as_list()) if shape.is_fully_defined() else (-1,)
    return OutsideVariable(variable.op.name, known, variable.dtype.base_dtype.name)


def take_over(team: Team, session: Any, variables: Sequence[Any]) -> None:
    """Make variables equal to worker 0's, where those are initialized. Collective."""
    numeric = [variable for variable in variables if variable.dtype.base_dtype not in (tf.string, tf.resource)]
    check_alike(team, [describe(variable) for variable in numeric])
    values = _read_started(session, numeric) if team.rank == 0 else [None] * len(numeric)
    shapes = team.gather_json([None if value is None else list(value.shape) for value in values])[0]
    ready = [i for i, shape in enumerate(shapes) if shape is not None]
    mine = [_or_empty(values[i], shapes[i], numeric[i]) for i in ready]
    taken = take_from_first(team, mine, "the initial variables")
    if team.rank:
        write(session, [numeric[i] for i in ready], taken)


def settle(team: Team, session: Any, variables: Sequence[Any]) -> list[Any]:
    """Copy from worker 0 the variables that a step has left different, such as moving averages. Collective.

    Returns the variables that were equal on all workers.
    """
    values = read(session, variables)
    rows = team.gather_ints([digest(value) for value in values], "the others' moving averages")
    is_same = [len(set(column)) == 1 for column in zip(*rows, strict=True)]
    changed = [i for i, same in enumerate(is_same) if not same]
    if changed:
        taken = take_from_first(team, [values[i] for i in changed], "moving averages")
        if team.rank:
            write(session, [variables[i] for i in changed], taken)
    return [variable for variable, same in zip(variables, is_same, strict=True) if same]


def compare(team: Team, session: Any, variables: Sequence[Any]) -> None:
    """Raise :class:`~poseidon.errors.MismatchError` unless variables have the same bits on all workers. Collective."""
    sums = [digest(value) for value in read(session, variables)]
    everybody = team.gather_ints(sums, "the comparison of replicas")
    for rank, theirs in enumerate(everybody):
        for variable, left, right in zip(variables, everybody[0], theirs, strict=True):
            if left != right:
                raise MismatchError(
                    f"replicas differ: {variable.op.name} on rank {rank} ({team.watch.hosts[rank]}) is not what rank 0 "
                    f"({team.watch.hosts[0]}) has. Was it assigned on one worker only?"
                )


def read(session: Any, variables: Sequence[Any]) -> list[Array]:
    """Return the variables' values."""
    return [np.asarray(value) for value in session.run(list(variables))]


def write(session: Any, variables: Sequence[Any], values: Sequence[Array]) -> None:
    """Assign variables through their own initializers: a finalized graph accepts no new operations."""
    waiting = list(zip(variables, values, strict=True))
    while waiting:
        feeds: dict[str, Array] = {}
        operations, later = [], []
        for variable, value in waiting:
            source = variable.initializer.inputs[1]
            if source.name in feeds:  # variables that start from one tensor cannot be written at once
                later.append((variable, value))
                continue
            feeds[source.name] = value
            operations.append(variable.initializer)
        session.run(operations, feeds)
        waiting = later


def _read_started(session: Any, variables: Sequence[Any]) -> list[Array | None]:
    try:
        return list(read(session, variables))
    except tf.errors.FailedPreconditionError:
        return [_read_one(session, variable) for variable in variables]


def _read_one(session: Any, variable: Any) -> Array | None:
    try:
        return read(session, [variable])[0]
    except tf.errors.FailedPreconditionError:
        return None


def _or_empty(value: Array | None, shape: Sequence[int], variable: Any) -> Array:
    return np.empty(shape, variable.dtype.base_dtype.as_numpy_dtype) if value is None else value


def digest(value: Array) -> int:
    """Return a number that tells values apart."""
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
