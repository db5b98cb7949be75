"""Dense and Embedding layers whose product or lookup goes through a function of ours with its own derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from poseidon.keras.backend import Setup

Tap = Callable[[Any], Any]
"""From a layer's inputs to their product with its kernel, or to rows of its table; None: use the layer's own code."""


def find_short_layers(setup: Setup) -> dict[int, Any]:
    """Return the layers of linear and embedding units, by the number of the unit."""
    owner_of: dict[int, Any] = {}
    for layer in setup.model._flatten_layers():
        weight = getattr(layer, "_kernel" if type(layer) is keras.layers.Dense else "_embeddings", None)
        if weight is not None:
            owner_of.setdefault(id(weight), layer)
    return {
        number: owner_of[id(setup.variables[unit.positions[0]])]
        for number, unit in enumerate(setup.units)
        if unit.kind != "dense"
    }


def tap(layer: Any, function: Tap) -> None:
    """Route a layer's call through ``function``; ``del layer.call`` undoes it."""
    plain = type(layer).call

    def call_dense(inputs: Any, training: Any = None) -> Any:
        outputs = function(inputs)
        if outputs is None:
            return plain(layer, inputs, training)
        if layer.bias is not None:
            outputs = keras.ops.add(outputs, layer.bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    def call_embedding(inputs: Any) -> Any:
        outputs = function(inputs)
        return plain(layer, inputs) if outputs is None else keras.ops.cast(outputs, layer.compute_dtype)

    layer.call = call_dense if isinstance(layer, keras.layers.Dense) else call_embedding
