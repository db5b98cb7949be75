"""What a TensorFlow 1 graph says about a run: which operations it takes, which variables it starts or assigns.

Everything here reads graphs and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1

_ASSIGNMENTS = ("Assign", "AssignAdd", "AssignSub", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_HOLDING = ("VarHandleOp", "ReadVariableOp", "VariableV2", "Variable")
_PASSING = ("Identity", "ReadVariableOp", "Enter", "RefEnter", "Switch", "RefSwitch")


def length_of(tensor: Any) -> int | None:
    """Return how many rows a tensor has by its shape; None if that is left open."""
    return tensor.shape.as_list()[0] if tensor.shape.rank else None


def operation_of(element: Any) -> Any:
    """Return the operation behind a tensor or variable, or the operation itself."""
    return getattr(element, "op", element)


def find_ancestors(elements: Iterable[Any], fed: Collection[str] = ()) -> dict[str, Any]:
    """Return by name all operations that must run for some tensors or operations; what is fed is not computed."""
    found: dict[str, Any] = {}
    waiting = [operation_of(element) for element in elements if getattr(element, "name", "") not in fed]
    while waiting:
        operation = waiting.pop()
        if operation.name in found:
            continue
        found[operation.name] = operation
        waiting += [tensor.op for tensor in operation.inputs if tensor.name not in fed]
        waiting += operation.control_inputs
    return found


def find_descendants(operations: Iterable[Any]) -> set[str]:
    """Return the names of all operations that use results of some operations, or results made from these."""
    found: set[str] = set()
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found.add(operation.name)
            waiting += [consumer for tensor in operation.outputs for consumer in tensor.consumers()]
    return found


def tensors_of(gradient: Any) -> list[Any]:
    """Return the tensors that make up a gradient: one, two for slices, none for None."""
    if gradient is None:
        return []
    return [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]


def all_variables(graph: Any) -> list[Any]:
    """Return the variables that a graph keeps from run to run, in the order in which they were made."""
    found = graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES) + graph.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES)
    return list({variable.op.name: variable for variable in found}.values())


def started_variables(graph: Any, operations: Collection[str]) -> list[Any]:
    """Return the variables whose initializers are among the operations."""
    return [v for v in all_variables(graph) if v.initializer is not None and v.initializer.name in operations]


def assigned_variables(graph: Any, operations: dict[str, Any]) -> list[Any]:
    """Return the variables, of those that a graph keeps, to which some of the operations assign values."""
    names = {_holder(operation.inputs[0]).name for operation in operations.values() if operation.type in _ASSIGNMENTS}
    return [variable for variable in all_variables(graph) if variable.op.name in names]


def rests_on_variables(tensor: Any) -> bool:
    """Tell whether nothing but variables and constants decides a tensor, so that it is the same on all workers."""
    operations = find_ancestors([tensor]).values()
    return not any(
        operation.type.startswith("Placeholder") or (operation.op_def.is_stateful and operation.type not in _HOLDING)
        for operation in operations
    )


def find_batch(operations: dict[str, Any]) -> Any | None:
    """Return what a tf.data iterator yields first, if it has rows: its length counts the samples of a step."""
    for operation in operations.values():
        if operation.type in ("IteratorGetNext", "IteratorGetNextV2"):
            for tensor in operation.outputs:
                if tensor.shape.rank:
                    return tensor
    return None


def redirect(old: Sequence[Any], new: Sequence[Any], consumers: Collection[str]) -> None:
    """Make operations, given by name, read new tensors where they read old ones."""
    for before, after in zip(old, new, strict=True):
        for consumer in before.consumers():
            if consumer.name in consumers:
                for index, tensor in enumerate(consumer.inputs):
                    if tensor is before:
                        consumer._update_input(index, after)


@dataclass(frozen=True)
class Purpose:
    """What a run does that concerns other workers."""

    exchanges: tuple[int, ...]
    """Numbers of the exchanges that it takes part in: it is a training step if there are any."""
    started: tuple[Any, ...]
    """Variables that it initializes."""
    assigned: tuple[Any, ...]
    """Variables that it assigns values to, other than by an optimizer."""


def find_purpose(graph: Any, elements: Sequence[Any], fed: Collection[str], exchanges: dict[str, int]) -> Purpose:
    """Return what a run of some tensors and operations does; ``exchanges`` are known by their operations' names."""
    operations = find_ancestors(elements, fed)
    taken = sorted({number for name, number in exchanges.items() if name in operations})
    started = started_variables(graph, operations)
    assigned = [v for v in assigned_variables(graph, operations) if not any(v is other for other in started)]
    return Purpose(tuple(taken), tuple(started), tuple(assigned))


def _holder(tensor: Any) -> Any:
    """Return the operation that made a variable's handle or reference."""
    operation = tensor.op
    while operation.type in _PASSING and operation.inputs:
        operation = operation.inputs[0].op
    return operation
