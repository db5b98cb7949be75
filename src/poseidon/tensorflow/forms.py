"""The form in which one gradient of a graph travels."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from poseidon.engine.outside import OutsideUnit, OutsideVariable
from poseidon.errors import UnsupportedError
from poseidon.tensorflow.exchange import find_factors
from poseidon.tensorflow.graphs import rests_on_variables
from poseidon.tensorflow.variables import describe

_LEAST_MATRIX = 2**14
"""Size of a matrix below which factors do not pay: it fits in a packet or two."""


class Form:
    """In full, as factors, or as rows of a matrix, whatever the shape of the variable."""

    def __init__(self, gradient: Any, variable: Any) -> None:
        if not variable.shape.is_fully_defined():
            raise UnsupportedError(
                f"{variable.op.name} has shape {variable.shape}; gradients of variables without a fixed shape cannot "
                "be averaged: set its shape when you create it"
            )
        self._gradient = gradient
        self._shape = tuple(variable.shape.as_list())
        self._is_sparse = isinstance(gradient, tf.IndexedSlices)
        self._is_linear = False
        self._rest: list[Any] = []
        described = describe(variable)
        matrix = (self._shape[0], math.prod(self._shape[1:])) if self._is_sparse else self._shape
        self.variable = OutsideVariable(described.name, matrix, described.dtype)
        self.flat = gradient
        """What travels."""
        if self._is_sparse and len(self._shape) != 2:
            values = tf.reshape(gradient.values, [-1, matrix[1]])
            self.flat = tf.IndexedSlices(values, gradient.indices, tf.constant(matrix, tf.int64))
        elif not self._is_sparse and len(self._shape) == 2 and math.prod(self._shape) >= _LEAST_MATRIX:
            self.flat, self._rest = split_products(gradient)
            self._is_linear = bool(find_factors(self.flat))

    def unit(self, position: int) -> OutsideUnit:
        """Return the variable as its own unit."""
        if self._is_sparse:
            return OutsideUnit(self.variable.name, "embedding", (position,), is_sparse=True)
        return OutsideUnit(self.variable.name, "linear" if self._is_linear else "dense", (position,))

    def complete(self, mean: Any) -> Any:
        """Convert the mean of what travelled to the mean of the gradient, in its shape and type."""
        if not self._is_sparse:
            return tf.add_n([mean, *self._rest]) if self._rest else mean
        values = tf.reshape(mean.values, [-1, *self._shape[1:]])
        shape = tf.constant(self._shape, tf.int64)
        return tf.IndexedSlices(values, tf.cast(mean.indices, self._gradient.indices.dtype), shape)


def split_products(gradient: Any) -> tuple[Any, list[Any]]:
    """Return a gradient as a sum of products of factors, and terms that are equal on all workers.

    Weight decay is such a term: it need not travel, and the rest can travel as factors. A gradient of any other form is
    returned unchanged.
    """
    if gradient.op.type not in ("AddN", "AddV2") or any(part.shape != gradient.shape for part in gradient.op.inputs):
        return gradient, []
    products = [part for part in gradient.op.inputs if find_factors(part)]
    rest = [part for part in gradient.op.inputs if not find_factors(part)]
    if not products or not all(map(rests_on_variables, rest)):
        return gradient, []
    return tf.add_n(products) if len(products) > 1 else products[0], rest
