"""Gradients exchanged inside a TensorFlow graph, or eagerly.

One operation per unit hands its gradients to the engine. It is declared stateless, so TensorFlow runs it as soon as the
gradients exist, while backward continues below; stateful operations would run in program order. One more operation,
after all of these, waits for the means. Only this one waits for exchanges: one per variable could block all of
TensorFlow's threads while a gradient that other workers wait for has yet to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from poseidon.engine.outside import OutsideFrontEnd, OutsideUnit, Rows
from poseidon.engine.rollcall import pack_flags, unpack_flags
from poseidon.errors import UnsupportedError

Gradient = Any
"""A tf.Tensor, tf.IndexedSlices or None."""


class GraphExchange:
    """Connects TensorFlow's gradients to a front end. Its callbacks run on TensorFlow's threads."""

    def __init__(self, front: OutsideFrontEnd, units: Sequence[OutsideUnit]) -> None:
        self.front = front
        self._units = units
        self._tables = {position for unit in units if unit.kind == "embedding" for position in unit.positions}
        self._unused: list[int] = []
        """Positions without a gradient in the step being traced."""
        self._has_begun = False
        self._last: Any = None
        """A result of the last step in the graph that is being traced."""
        self.error: BaseException | None = None
        """The first error of a callback; TensorFlow would only pass on its text."""

    def begin(self, samples: Any, after: Any = None) -> Any:
        """Start a step to which this worker adds ``samples`` samples; return a token for :meth:`average`.

        With ``after``, a value that is computed anew in each step, it starts as soon as that is known, and not behind
        whatever else has effects and was traced before, such as parts of backward.
        """
        if tf.executing_eagerly():
            self._has_begun = True
            self.front.begin(int(samples))
            return None
        unused = self._unused = []

        def begin(count: Any, *_: Any) -> Any:
            self.front.begin(int(count), unused)
            return np.int32(0)

        # A graph may hold several steps, one after the other.
        is_later = self._last is not None and self._last.graph is tf.compat.v1.get_default_graph()
        with tf.control_dependencies([self._last] if is_later else []):
            # Stateful unless something changes: TensorFlow folds stateless operations on constants into one run.
            given = [samples] if after is None else [samples, after]
            return tf.numpy_function(self._guarded(begin), given, tf.int32, stateful=after is None)

    def average(self, gradients: Sequence[Gradient], token: Any = None) -> list[Gradient]:
        """Return the means of gradients given in the order of the front end's variables; None stays None."""
        gradients = [self._plain(position, gradient) for position, gradient in enumerate(gradients)]
        if tf.executing_eagerly():
            return self._average_now(gradients)
        if token is None:
            token = self.begin(tf.constant(1))
        self._unused += [position for position, gradient in enumerate(gradients) if gradient is None]
        tokens = [token]
        for unit in self._units:
            given = [position for position in unit.positions if gradients[position] is not None]
            if given:
                tokens.append(self._give(unit, given, gradients, token))
        return self._await(gradients, tokens)

    def _plain(self, position: int, gradient: Gradient) -> Gradient:
        """Return a gradient in dense form, unless it is an embedding's, whose rows can travel alone."""
        if not isinstance(gradient, tf.IndexedSlices) or position in self._tables:
            return gradient
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, self.front.shape(position)[0])

    def _average_now(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        if not self._has_begun:
            self.front.begin(1)
        self._has_begun = False
        for position, gradient in enumerate(gradients):
            if gradient is None:
                self.front.leave_out(position)
            elif isinstance(gradient, tf.IndexedSlices):
                self.front.give_rows(position, gradient.indices.numpy(), gradient.values.numpy())
            else:
                self.front.give(position, gradient.numpy())
        self.front.finish()
        # A worker whose samples do not reach a variable makes the others' update too.
        words = self.front.team.gather_ints(pack_flags([each is not None for each in gradients]), "who has gradients")
        flags = [unpack_flags(row, len(gradients)) for row in words]
        return [self._mean_now(p) if any(have) else None for p, have in enumerate(zip(*flags, strict=True))]

    def _mean_now(self, position: int) -> Gradient:
        mean = self.front.mean(position)
        if isinstance(mean, Rows):
            return tf.IndexedSlices(mean.values, mean.numbers, tf.constant(self.front.shape(position), tf.int64))
        return tf.convert_to_tensor(mean)

    def _give(self, unit: OutsideUnit, given: Sequence[int], gradients: Sequence[Gradient], token: Any) -> Any:
        """Return an operation that hands over a unit's gradients in the shortest form found in the graph."""
        gradient = gradients[given[0]]
        factors = find_factors(gradient) if unit.kind == "linear" else []
        if isinstance(gradient, tf.IndexedSlices):
            inputs = [gradient.indices, gradient.values]
        elif factors:
            inputs = [tensor for pair in factors for tensor in pair]
        else:
            inputs = [gradients[position] for position in given]

        def give(_: Any, *arrays: Any) -> Any:
            if isinstance(gradient, tf.IndexedSlices):
                self.front.give_rows(given[0], *arrays)
            elif factors:
                self.front.give_factors(given[0], list(zip(arrays[::2], arrays[1::2], strict=True)))
            else:
                for position, array in zip(given, arrays, strict=True):
                    self.front.give(position, array)
            return np.int32(0)

        return tf.numpy_function(self._guarded(give), [token, *inputs], tf.int32, stateful=False)

    def _await(self, gradients: Sequence[Gradient], tokens: Sequence[Any]) -> list[Gradient]:
        """Return the means, as the results of one operation that waits for all of them."""
        used = [position for position, gradient in enumerate(gradients) if gradient is not None]
        sparse = {p for unit in self._units if unit.is_sparse for p in unit.positions}
        sparse = {p for p in used if p in sparse and isinstance(gradients[p], tf.IndexedSlices)}

        def finish(*_: Any) -> list[Any]:
            self.front.finish()
            results: list[Any] = []
            for position in used:
                mean = self.front.mean(position)
                results += [mean.numbers, mean.values] if isinstance(mean, Rows) else [mean]
            return results

        types = [t for p in used for t in ([tf.int64] if p in sparse else []) + [gradients[p].dtype]]
        found = tf.numpy_function(self._guarded(finish), list(tokens), types, stateful=False)
        self._last = found[0] if used else self._last
        results = iter(found)
        means: list[Gradient] = [None] * len(gradients)
        for position in used:
            numbers = next(results) if position in sparse else None
            mean, shape = next(results), self.front.shape(position)
            mean.set_shape(shape if numbers is None else (None, *shape[1:]))
            means[position] = mean if numbers is None else tf.IndexedSlices(mean, numbers, tf.constant(shape, tf.int64))
        return means

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arrays: Any) -> Any:
            try:
                return function(*arrays)
            except BaseException as error:
                self.error = self.error or error
                raise

        return call


def find_factors(gradient: Gradient) -> list[tuple[Any, Any]]:
    """Return tensors (x, g) whose products ``x^T g`` sum to a gradient; empty if the graph computes it otherwise.

    The operations that compute the gradient itself are then unused, and TensorFlow prunes them.
    """
    if not isinstance(gradient, tf.Tensor):
        return []
    operation = gradient.op
    if operation.type in ("Identity", "Cast"):
        return find_factors(operation.inputs[0])
    if operation.type in ("AddN", "AddV2"):
        found = [find_factors(part) for part in operation.inputs]
        is_alike = all(found) and all(part.shape == gradient.shape for part in operation.inputs)
        return [pair for pairs in found for pair in pairs] if is_alike else []
    is_product = operation.type == "MatMul" and operation.get_attr("transpose_a")
    if not is_product or operation.get_attr("transpose_b"):
        return []
    return [tuple(operation.inputs)]


def check_no_strategy(optimizer: Any) -> None:
    """Raise if TensorFlow itself distributes the code that uses an optimizer."""
    if tf.distribute.has_strategy():
        raise UnsupportedError(
            f"{type(optimizer).__name__} is used inside tf.distribute's "
            f"{type(tf.distribute.get_strategy()).__name__}: two systems cannot distribute one script; remove the "
            "strategy, or run without --auto"
        )
