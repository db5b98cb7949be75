"""From a Keras model to its units: which layer owns which variables, and in which form their gradients can travel."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras

from poseidon.engine.outside import OutsideUnit, OutsideVariable
from poseidon.units import Kind


def describe_variables(variables: Sequence[Any]) -> list[OutsideVariable]:
    """Return plain descriptions, equal for the variables of two equal models."""
    return [OutsideVariable(v.path, tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]


def describe_model(model: Any) -> list[OutsideVariable]:
    """Describe a model's weights and its optimizer's variables, independent of the numbers in Keras' names."""
    trainable = {id(variable) for variable in model.trainable_variables}
    names: dict[str, str] = {}
    described = []
    for variable, plain in zip(model.weights, describe_variables(model.weights), strict=True):
        path = "/".join(_renumbered(part, names) for part in plain.name.split("/"))
        state = "trainable" if id(variable) in trainable else "not trainable"
        described.append(OutsideVariable(f"{path} ({state})", plain.shape, plain.dtype))
    kind = type(model.optimizer).__name__
    for number, plain in enumerate(describe_variables(model.optimizer.variables)):
        described.append(OutsideVariable(f"{kind}'s variable {number}", plain.shape, plain.dtype))
    return described


def _renumbered(part: str, names: dict[str, str]) -> str:
    """Return the name Keras would give to a part of a path if this model were the first one created."""
    if part not in names:
        base = re.sub(r"_\d+$", "", part)
        count = sum(re.sub(r"_\d+$", "", other) == base for other in names)
        names[part] = f"{base}_{count}" if count else base
    return names[part]


def find_units(model: Any, forms: Collection[Kind], has_sparse_means: bool) -> list[OutsideUnit]:
    """Return units that together hold every trainable variable once; positions count in ``trainable_variables``.

    ``forms`` are those in which the backend can deliver gradients. A layer that is not a plain Dense or Embedding, or
    whose weight has a regularizer (so its gradient is not a pure product), travels in full.
    """
    position_of = {id(variable): position for position, variable in enumerate(model.trainable_variables)}
    left = dict(position_of)
    names: Counter[str] = Counter()
    units: list[OutsideUnit] = []
    for layer in model._flatten_layers():
        mine = [v for v in layer._trainable_variables if id(v) in left]
        for kind, variables in _split(layer, mine, forms):
            positions = tuple(left.pop(id(v)) for v in variables)
            name = _name(variables[0], kind, mine[0] is not variables[0]).removeprefix(f"{model.name}/")
            names[name] += 1
            name = name if names[name] == 1 else f"{name}[{names[name]}]"
            units.append(OutsideUnit(name, kind, positions, kind == "embedding" and has_sparse_means))
    for position in left.values():
        units.append(OutsideUnit(model.trainable_variables[position].path, "dense", (position,)))
    return units


def select_units(units: Sequence[OutsideUnit], variables: Sequence[Any], wanted: Sequence[Any]) -> list[OutsideUnit]:
    """Return units for some variables only, in the forms that they have among all; positions count in ``wanted``."""
    left = {id(variable): position for position, variable in enumerate(wanted)}
    found = []
    for unit in units:
        positions = tuple(left.pop(id(variables[p])) for p in unit.positions if id(variables[p]) in left)
        if positions:
            found.append(OutsideUnit(unit.name, unit.kind, positions, unit.is_sparse))
    found += [OutsideUnit(wanted[position].path, "dense", (position,)) for position in left.values()]
    return found


def _split(layer: Any, variables: list[Any], forms: Collection[Kind]) -> Iterator[tuple[Kind, list[Any]]]:
    """Yield a layer's variables as they travel: a weight in its short form, the rest dense."""
    if not variables:
        return
    kind = _kind(layer, variables[0])
    if kind in forms:
        yield kind, variables[:1]
        variables = variables[1:]
    if variables:
        yield "dense", variables


def _kind(layer: Any, weight: Any) -> Kind:
    # Exactly these classes: a subclass may use its weight in other ways.
    if getattr(layer, "lora_enabled", False) or getattr(weight, "regularizer", None) is not None:
        return "dense"
    if type(layer) is keras.layers.Dense and weight is layer._kernel:
        return "linear"
    if type(layer) is keras.layers.Embedding and weight is layer._embeddings:
        return "embedding"
    return "dense"


def _name(variable: Any, kind: Kind, is_rest: bool) -> str:
    """Name a unit after its layer, or after its variable if it holds the rest of a layer."""
    path: str = variable.path
    return path if kind == "dense" and is_rest else path.rpartition("/")[0] or path
