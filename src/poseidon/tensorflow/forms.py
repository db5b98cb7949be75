"""The form in which one gradient of a graph travels."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from poseidon.engine.outside import OutsideUnit, OutsideVariable
from poseidon.errors import UnsupportedError
from poseidon.tensorflow.exchange import find_factors
from poseidon.tensorflow.variables import describe
from poseidon.units import Kind

_LEAST_MATRIX = 2**14
"""Values of a matrix below which its factors are not worth looking at: it fits in a packet or two."""


class Form:
    """As it is, as factors, or as rows of a matrix, whatever the shape of the variable."""

    def __init__(self, gradient: Any, variable: Any) -> None:
        if not variable.shape.is_fully_defined():
            raise UnsupportedError(
                f"{variable.op.name} has shape {variable.shape}; gradients of variables without a fixed shape cannot "
                "be averaged: give it one when it is made"
            )
        self._gradient = gradient
        self._shape = tuple(variable.shape.as_list())
        self._is_sparse = isinstance(gradient, tf.IndexedSlices)
        described = describe(variable)
        matrix = (self._shape[0], math.prod(self._shape[1:])) if self._is_sparse else self._shape
        self.variable = OutsideVariable(described.name, matrix, described.dtype)
        self.flat = gradient
        if self._is_sparse and len(self._shape) != 2:
            values = tf.reshape(gradient.values, [-1, matrix[1]])
            self.flat = tf.IndexedSlices(values, gradient.indices, tf.constant(matrix, tf.int64))

    def unit(self, position: int) -> OutsideUnit:
        """Return the variable as a unit of its own."""
        if self._is_sparse:
            return OutsideUnit(self.variable.name, "embedding", (position,), is_sparse=True)
        is_large = len(self._shape) == 2 and math.prod(self._shape) >= _LEAST_MATRIX
        kind: Kind = "linear" if is_large and find_factors(self._gradient) else "dense"
        return OutsideUnit(self.variable.name, kind, (position,))

    def unflatten(self, mean: Any) -> Any:
        """Return a mean in the shape, and with the types, of the gradient."""
        if not self._is_sparse:
            return mean
        values = tf.reshape(mean.values, [-1, *self._shape[1:]])
        shape = tf.constant(self._shape, tf.int64)
        return tf.IndexedSlices(values, tf.cast(mean.indices, self._gradient.indices.dtype), shape)
