"""A script's own TensorFlow 2 loops: gradients from a tape, applied by a Keras optimizer, eagerly or traced.

Gradients are averaged where they are applied. What a script does to them before (e.g. clipping) acts on each worker's
own gradients; an optimizer's clipping sees the means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist

from poseidon.engine.assemble import ExchangeOptions
from poseidon.engine.outside import (
    OutsideFrontEnd,
    OutsideUnit,
    OutsideVariable,
    check_alike,
    take_from_first,
)
from poseidon.following.keras_rates import scale_rate
from poseidon.following.nesting import Nesting
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.team.verify import check_same_bits
from poseidon.tensorflow.datasets import Datasets
from poseidon.tensorflow.exchange import GraphExchange, check_no_strategy


class EagerLoops:
    """Averages the gradients that Keras optimizers get outside ``fit``."""

    def __init__(self, team: Team, datasets: Datasets, report: ScriptReport, rate: float = 1.0) -> None:
        self._team = team
        self._rate = rate
        """Factor for learning rates."""
        self._datasets = datasets
        self._report = report
        self._exchanges: dict[tuple[int, ...], tuple[GraphExchange, Sequence[Any]]] = {}
        """By the ids of an optimizer and its variables, which are kept alive."""
        self._nesting = Nesting()

    @property
    def has_trained(self) -> bool:
        """Whether any gradients were averaged."""
        return bool(self._exchanges)

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        kinds = {kind for found in vars(keras.optimizers).values() if isinstance(found, type) for kind in found.__mro__}
        for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
            if "apply" in vars(kind):
                patches.wrap(kind, "apply", self._apply)
        patches.on_undo(self.close)

    def conclude(self) -> None:
        """Check at the end that the workers hold the same. Collective."""
        for exchange, (_, *variables) in self._exchanges.values():
            values = [torch.from_numpy(np.array(variable)) for variable in variables]
            names = [variable.name for variable in variables]
            check_same_bits(exchange.front.team, list(zip(names, values, strict=True)))

    def close(self) -> None:
        """End the engines."""
        for exchange, _ in self._exchanges.values():
            exchange.front.close()
        self._exchanges.clear()

    def _apply(self, original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        # The optimizer of a model that poseidon.keras distributes has its own `apply`.
        if self._nesting.is_inside or "apply" in vars(optimizer) or keras.backend.backend() != "tensorflow":
            return original(optimizer, grads, trainable_variables)
        check_no_strategy(optimizer)
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        exchange = self._exchange_of(optimizer, variables)
        means = exchange.average(list(grads), exchange.begin(self._samples()))
        with self._nesting.enter():
            return original(optimizer, means, trainable_variables)

    def _exchange_of(self, optimizer: Any, variables: Sequence[Any]) -> GraphExchange:
        key = (id(optimizer), *map(id, variables))
        if key not in self._exchanges:
            # The loop may be in the middle of tracing.
            with tf.init_scope():
                self._exchanges[key] = (self._make(optimizer, variables), (optimizer, *variables))
        return self._exchanges[key][0]

    def _make(self, optimizer: Any, variables: Sequence[Any]) -> GraphExchange:
        described = [
            OutsideVariable(
                f"{variable.name} ({i})", tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)
            )
            for i, variable in enumerate(variables)
        ]
        team = Team(dist.new_group(), self._team.timeout_s)
        check_alike(team, described)
        taken = take_from_first(team, [np.asarray(variable) for variable in variables])
        for variable, value in zip(variables, taken, strict=True):
            variable.assign(value)
        if self._rate != 1.0:
            scale_rate(optimizer, self._rate, self._report)
        units = [OutsideUnit(one.name, "dense", (i,)) for i, one in enumerate(described)]
        front = OutsideFrontEnd(team, described, units, ExchangeOptions(timeout_s=self._team.timeout_s))
        self._report.say(
            f"{type(optimizer).__name__}: {len(variables)} variables, taken from worker 0; gradients are averaged when "
            "they are applied"
        )
        return GraphExchange(front, units)

    def _samples(self) -> Any:
        """Return how many samples this worker adds: the rows of the last batch that was dealt out."""
        if tf.executing_eagerly():
            return self._datasets.rows
        return tf.numpy_function(lambda: np.int64(self._datasets.rows), [], tf.int64, stateful=True)
