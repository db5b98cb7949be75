"""State that must be equal on all workers: variables from worker 0, totals of metrics, one set of logs."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from poseidon.engine.outside import take_from_first
from poseidon.errors import MismatchError
from poseidon.team.team import Team


def state_of(model: Any) -> list[Any]:
    """Return the variables that make up a model's state: weights and moving averages, and the optimizer's."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.weights, *(optimizer.variables if optimizer is not None else ())]


def share(team: Team, variables: Sequence[Any], what: str) -> list[Any]:
    """Make variables equal to worker 0's; only those that differ travel, and are returned. Collective."""
    arrays = [np.asarray(keras.ops.convert_to_numpy(variable), order="C") for variable in variables]
    if not arrays:
        return []
    rows = team.gather_ints([zlib.crc32(array.tobytes()) for array in arrays], what)
    changed = [i for i, sums in enumerate(zip(*rows, strict=True)) if len(set(sums)) > 1]
    for i, array in zip(changed, take_from_first(team, [arrays[i] for i in changed], what), strict=True):
        if team.rank != 0:
            variables[i].assign(array)
    return [variables[i] for i in changed]


def add_up_metrics(team: Team, metrics: Sequence[Any]) -> None:
    """Replace the state of metrics by its sum over all workers. Collective.

    Keras' own metrics keep sums and counts, so the result is that of one worker with all samples. The meaning of a
    foreign metric's state is unknown, so it does not change.
    """
    variables = [v for metric in metrics for part in _parts_of(metric) if _adds_up(part) for v in part.variables]
    arrays = [np.asarray(keras.ops.convert_to_numpy(variable), np.float64) for variable in variables]
    totals = iter(sum_floats(team, [float(value) for array in arrays for value in array.flat], "the metrics"))
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(np.array([next(totals) for _ in range(array.size)]).reshape(array.shape))


def _parts_of(metric: Any) -> list[Any]:
    """Return a metric, or those given to compile(), which Keras keeps together."""
    parts = getattr(metric, "metrics", None)
    return [inner for part in parts for inner in _parts_of(part)] if parts else [metric]


def _adds_up(metric: Any) -> bool:
    return type(metric).__module__.partition(".")[0] == "keras"


def sum_floats(team: Team, values: Sequence[float], what: str) -> list[float]:
    """Return sums over all workers, added in rank order and so bit-identical on all of them. Collective."""
    return [sum(column) for column in zip(*_gather_floats(team, values, what), strict=True)]


def same_logs(team: Team, logs: Mapping[str, Any]) -> dict[str, float]:
    """Return worker 0's logs, so that callbacks make the same decisions on all workers. Collective."""
    numbers = {name: float(logs[name]) for name in sorted(logs) if np.ndim(logs[name]) == 0}
    names = [row[0] for row in team.gather_ints([zlib.crc32(repr(list(numbers)).encode())], "the logs")]
    if len(set(names)) > 1:
        rank = next(rank for rank, name in enumerate(names) if name != names[0])
        raise MismatchError(
            f"worker {rank} has other logs than worker 0 (worker {team.rank}: {', '.join(numbers)}); give "
            "fit() the same metrics, validation data and callbacks on all workers"
        )
    first = _gather_floats(team, list(numbers.values()), "the logs")[0]
    return dict(zip(numbers, first, strict=True))


def mean_logs(team: Team, logs: Any, part: float) -> Any:
    """Return logs that a step itself returned, averaged over all workers; ``part`` is this one's share. Collective."""
    if not isinstance(logs, Mapping):
        return logs
    numbers = {name: float(logs[name]) * part for name in sorted(logs) if np.ndim(logs[name]) == 0}
    totals = sum_floats(team, list(numbers.values()), "the logs")
    return {**logs, **dict(zip(numbers, totals, strict=True))}


def _gather_floats(team: Team, values: Sequence[float], what: str) -> list[tuple[float, ...]]:
    words = struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))
    return [struct.unpack(f"{len(row)}d", struct.pack(f"{len(row)}q", *row)) for row in team.gather_ints(words, what)]
