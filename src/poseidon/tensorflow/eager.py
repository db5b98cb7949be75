"""A script's own TensorFlow 2 loops: gradients from a tape, applied by a Keras optimizer, eagerly or traced.

Gradients are averaged where they are applied. What a script does to them before (e.g. clipping) acts on each worker's
own gradients; an optimizer's clipping sees the means.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch.distributed as dist

from poseidon.engine.assemble import ExchangeOptions
from poseidon.engine.outside import (
    OutsideFrontEnd,
    OutsideUnit,
    OutsideVariable,
    as_tensor,
    check_alike,
    take_from_first,
)
from poseidon.errors import UnsupportedError
from poseidon.following.keras_rates import SEED_STRIDE, scale_rate
from poseidon.following.nesting import APPLYING
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.team.verify import check_same_bits
from poseidon.tensorflow.datasets import Datasets
from poseidon.tensorflow.exchange import GraphExchange, check_no_strategy
from poseidon.tensorflow.loose import LooseVariables


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
        self._loose = LooseVariables(team, report)
        self._shifted: weakref.WeakSet[Any] = weakref.WeakSet()
        """Generators of random numbers that are each worker's own."""
        self._settled = 0
        """Steps when loose variables were last made alike."""

    @property
    def has_trained(self) -> bool:
        """Whether any gradients were averaged."""
        return bool(self._exchanges)

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        wrap_optimizers(patches, self._apply)
        self._loose.install(patches)
        self._datasets.on_loop = self._turn
        patches.on_undo(self.close)

    def conclude(self) -> None:
        """Check at the end that the workers hold the same. Collective."""
        self._settle()
        for exchange, (_, *variables) in self._exchanges.values():
            values = [as_tensor(np.array(variable)) for variable in variables]
            names = [variable.name for variable in variables]
            check_same_bits(exchange.front.team, list(zip(names, values, strict=True)))

    def close(self) -> None:
        """End the engines."""
        for exchange, _ in self._exchanges.values():
            exchange.front.close()
        self._exchanges.clear()

    def _apply(self, original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        # The optimizer of a model that poseidon.keras distributes has its own `apply`.
        if APPLYING.is_inside or "apply" in vars(optimizer) or keras.backend.backend() != "tensorflow":
            return original(optimizer, grads, trainable_variables)
        check_no_strategy(optimizer)
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        exchange = self._exchange_of(optimizer, variables)
        means = exchange.average(list(grads), exchange.begin(self._samples()))
        with APPLYING.enter():
            return original(optimizer, means, trainable_variables)

    def _turn(self, is_dealt: bool | None) -> None:
        self._settle()
        self._loose.turn(is_dealt)

    def _settle(self) -> None:
        """Make alike what a loop has assigned besides training. Collective."""
        steps = sum(exchange.front.engine.step for exchange, _ in self._exchanges.values())
        if steps == self._settled:
            return
        self._settled = steps
        trained = {id(getattr(v, "_value", v)) for _, (_, *variables) in self._exchanges.values() for v in variables}
        self._loose.settle(trained)

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
        values = [np.asarray(variable) for variable in variables]
        empty = [v.name for v, value in zip(variables, values, strict=True) if value.shape != tuple(v.shape)]
        if empty:
            raise UnsupportedError(
                f"{empty[0]} has no value yet: the model is made inside a traced step; call it on a batch, or "
                "build() it, before the loop"
            )
        taken = take_from_first(team, values)
        for variable, value in zip(variables, taken, strict=True):
            variable.assign(value)
        self._shift_seeds()
        if self._rate != 1.0:
            scale_rate(optimizer, self._rate, self._report)
        units = [OutsideUnit(one.name, "dense", (i,)) for i, one in enumerate(described)]
        front = OutsideFrontEnd(team, described, units, ExchangeOptions(timeout_s=self._team.timeout_s))
        self._report.say(
            f"{type(optimizer).__name__}: {len(variables)} variables, taken from worker 0; gradients are averaged when "
            "they are applied"
        )
        return GraphExchange(front, units)

    def _shift_seeds(self) -> None:
        """Give each worker's layers random numbers of their own: Keras draws them by a state, alike on all workers."""
        for layer in [each for each in gc.get_objects() if issubclass(type(each), keras.layers.Layer)]:
            for generator in getattr(layer, "_seed_generators", ()):
                if generator not in self._shifted:
                    self._shifted.add(generator)
                    state = keras.ops.convert_to_numpy(generator.state)
                    generator.state.assign((state + SEED_STRIDE * self._team.rank).astype(state.dtype))

    def _samples(self) -> Any:
        """Return how many samples this worker adds: the rows of the last batch that was dealt out."""
        if tf.executing_eagerly():
            return self._datasets.rows
        return tf.numpy_function(lambda: np.int64(self._datasets.rows), [], tf.int64, stateful=True)


def wrap_optimizers(patches: Patches, around: Callable[..., Any]) -> None:
    """Replace ``apply`` of every class of Keras optimizers by ``around(original, optimizer, ...)``."""
    kinds = {kind for found in vars(keras.optimizers).values() if isinstance(found, type) for kind in found.__mro__}
    for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
        if "apply" in vars(kind):
            patches.wrap(kind, "apply", around)
