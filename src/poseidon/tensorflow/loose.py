"""Variables of a TensorFlow 2 loop that no optimizer trains: metrics, counters, moving averages.

In a loop over a dataset that is dealt out each worker assigns them from its own rows. A metric of Keras' own has sums,
which are added up whenever its result is read. Everything else is compared where a loop begins or ends, and becomes
worker 0's if the workers differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from poseidon.engine.outside import take_from_first
from poseidon.following.naming import is_called_by_keras
from poseidon.following.nesting import Nesting
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.tensorflow.variables import digest

Array = np.ndarray[Any, Any]


class LooseVariables:
    """Knows all variables and metrics that a script makes, and keeps them alike."""

    def __init__(self, team: Team, report: ScriptReport) -> None:
        self._team = team
        self._report = report
        self._variables: dict[int, weakref.ref[Any]] = {}
        """In order of creation, which is the same on all workers."""
        self._metrics: weakref.WeakSet[Any] = weakref.WeakSet()
        self._dealt: weakref.WeakSet[Any] = weakref.WeakSet()
        """Metrics that were last updated in a loop that is dealt out: each worker's covers its own rows."""
        self._is_dealt: bool | None = None
        """Whether the loop under way is dealt out; None: there is none."""
        self._start: dict[int, bytes] = {}
        """The states of the metrics when it began."""
        self._nesting = Nesting()

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        patches.wrap(resource_variable_ops.ResourceVariable, "__init__", self._make_variable)
        kinds = {kind for found in vars(keras.metrics).values() if isinstance(found, type) for kind in found.__mro__}
        for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
            if "result" in vars(kind) and issubclass(kind, keras.metrics.Metric):
                patches.wrap(kind, "result", self._result)
        patches.wrap(keras.metrics.Metric, "__init__", self._make_metric)

    def turn(self, is_dealt: bool | None) -> None:
        """Note the end of a loop, and the beginning of another unless ``is_dealt`` is None."""
        for metric in list(self._metrics):
            if self._is_dealt is not None and self._has_changed(metric):
                (self._dealt.add if self._is_dealt else self._dealt.discard)(metric)
        self._is_dealt = is_dealt
        self._start = {id(metric): _state(metric) for metric in self._metrics}

    def _has_changed(self, metric: Any) -> bool:
        return self._start.get(id(metric)) != _state(metric)

    def settle(self, trained: Collection[int]) -> None:
        """Make variables equal to worker 0's, except metrics and those whose ids are ``trained``. Collective."""
        counted = {id(_value_of(v)) for metric in list(self._metrics) for v in metric.variables}
        loose = [v for v in (ref() for ref in self._variables.values()) if v is not None]
        loose = [v for v in loose if id(v) not in counted and id(v) not in trained and not _draws(v)]
        counts = self._team.gather_ints([len(loose)], "the others' variables")
        if not loose or len({row[0] for row in counts}) > 1:
            return
        values = [v.numpy() for v in loose]
        rows = self._team.gather_ints([digest(value) for value in values], "the others' variables")
        changed = [i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
        if not changed:
            return
        names = ", ".join(loose[i].name.partition(":")[0] for i in changed[:3])
        self._report.say(f"{names}: assigned from each worker's own rows; worker 0's values are kept")
        taken = take_from_first(self._team, [values[i] for i in changed], "moving averages")
        for i, value in zip(changed, taken, strict=True):
            loose[i].assign(value)

    def _make_variable(self, original: Callable[..., Any], one: Any, *args: Any, **kwargs: Any) -> None:
        original(one, *args, **kwargs)
        with tf.init_scope():
            if tf.executing_eagerly() and one.dtype.is_numpy_compatible and one.dtype != tf.string:
                self._variables[len(self._variables)] = weakref.ref(one)

    def _make_metric(self, original: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> None:
        original(metric, *args, **kwargs)
        self._metrics.add(metric)

    def _result(self, original: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of all workers' rows."""
        is_ours = tf.executing_eagerly() and not self._nesting.is_inside and not is_called_by_keras()
        if not is_ours or type(metric).__module__.partition(".")[0] != "keras" or not metric.variables:
            return original(metric, *args, **kwargs)
        mine = [np.asarray(variable) for variable in metric.variables]
        totals = self._add_up(metric, mine)
        with self._nesting.enter():
            for variable, total in zip(metric.variables, totals, strict=True):
                variable.assign(total)
            try:
                return original(metric, *args, **kwargs)
            finally:
                for variable, value in zip(metric.variables, mine, strict=True):
                    variable.assign(value)

    def _add_up(self, metric: Any, mine: Sequence[Array]) -> Sequence[Array]:
        is_dealt = metric in self._dealt
        if self._is_dealt is not None and self._has_changed(metric):
            is_dealt = self._is_dealt
        parts = self._team.gather_bytes(bytes([is_dealt]) + _state(metric), "the others' metrics")
        if not any(part[0] for part in parts) and len(set(parts)) == 1:
            return mine
        totals, start = [], 1
        for array in mine:
            columns = [np.frombuffer(part, array.dtype, array.size, start).reshape(array.shape) for part in parts]
            totals.append(np.sum(columns, axis=0, dtype=array.dtype))
            start += array.nbytes
        return totals


def _value_of(variable: Any) -> Any:
    return getattr(variable, "_value", variable)


def _draws(variable: Any) -> bool:
    """Return whether a variable is the state of a random generator: those differ on purpose."""
    return "seed_generator" in variable.name or variable.dtype in (tf.uint32, tf.uint64)


def _state(metric: Any) -> bytes:
    return b"".join(np.ascontiguousarray(variable).tobytes() for variable in metric.variables)
