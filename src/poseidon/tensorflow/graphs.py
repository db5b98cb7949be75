"""What a TensorFlow 1 graph reveals about a run: the operations it needs, the variables it initializes or assigns.

Everything here reads graphs and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1

ASSIGNMENTS = (
    "Assign",
    "AssignAdd",
    "AssignSub",
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    *(
        f"{kind}Scatter{how}"
        for kind in ("", "Resource")
        for how in ("Update", "Add", "Sub", "Mul", "Div", "Min", "Max")
    ),
)
"""Operations that change a variable, their first input."""
HOLDING = ("VarHandleOp", "ReadVariableOp", "VariableV2", "Variable")
_TAKING = ("IteratorGetNext", "IteratorGetNextV2")
_PASSING = ("Identity", "ReadVariableOp", "Enter", "RefEnter", "Switch", "RefSwitch")


def length_of(tensor: Any) -> int | None:
    """Return the static number of rows of a tensor; None if it is open."""
    return tensor.shape.as_list()[0] if tensor.shape.rank else None


def operation_of(element: Any) -> Any:
    """Return the operation behind a tensor or variable, or the operation itself."""
    return getattr(element, "op", element)


def find_ancestors(elements: Iterable[Any], fed: Collection[str] = ()) -> dict[str, Any]:
    """Return by name all operations that must run for some tensors or operations; fed tensors are not computed."""
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
    """Return the names of all operations that depend on some operations."""
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
    """Return the variables that a graph keeps from run to run, in order of creation."""
    found = graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES) + graph.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES)
    return list({variable.op.name: variable for variable in found}.values())


def counting_variables(graph: Any) -> list[Any]:
    """Return all variables of a graph, with the local ones, in which metrics keep their counts."""
    local = graph.get_collection(v1.GraphKeys.LOCAL_VARIABLES) + graph.get_collection(v1.GraphKeys.METRIC_VARIABLES)
    return list({variable.op.name: variable for variable in [*all_variables(graph), *local]}.values())


def started_variables(graph: Any, operations: Collection[str]) -> list[Any]:
    """Return the variables whose initializers are among the operations."""
    return [v for v in all_variables(graph) if v.initializer is not None and v.initializer.name in operations]


def assigned_variables(graph: Any, operations: dict[str, Any]) -> list[Any]:
    """Return those of a graph's variables to which any of the operations assigns a value."""
    names = {holder_of(operation.inputs[0]).name for operation in operations.values() if operation.type in ASSIGNMENTS}
    return [variable for variable in counting_variables(graph) if variable.op.name in names]


def rests_on_variables(tensor: Any) -> bool:
    """Return whether a tensor depends only on variables and constants, so that it is equal on all workers."""
    operations = find_ancestors([tensor]).values()
    return not any(
        operation.type.startswith("Placeholder") or (operation.op_def.is_stateful and operation.type not in HOLDING)
        for operation in operations
    )


def find_batch(operations: dict[str, Any]) -> Any | None:
    """Return the first tensor that a tf.data iterator yields, if it has rows: its length is the step's sample count."""
    for operation in operations.values():
        if operation.type in _TAKING:
            for tensor in operation.outputs:
                if tensor.shape.rank:
                    return tensor
    return None


def redirect(old: Sequence[Any], new: Sequence[Any], consumers: Collection[str]) -> None:
    """Make operations, given by name, read new tensors in place of old ones."""
    for before, after in zip(old, new, strict=True):
        for consumer in before.consumers():
            if consumer.name in consumers:
                for index, tensor in enumerate(consumer.inputs):
                    if tensor is before:
                        consumer._update_input(index, after)


@dataclass(frozen=True)
class Purpose:
    """The effects of a run that concern other workers."""

    exchanges: tuple[int, ...]
    """Numbers of its exchanges; a run with any is a training step."""
    started: tuple[Any, ...]
    """Variables that it initializes."""
    assigned: tuple[Any, ...]
    """Variables that it assigns, other than by an optimizer."""
    operations: Mapping[str, Any]
    """All operations that it runs, by name."""
    dealt: tuple[Any, ...]
    """Tensors with the rows that it takes from a dataset that is dealt out."""


def find_purpose(
    graph: Any, elements: Sequence[Any], fed: Collection[str], exchanges: dict[str, int], dealt: Collection[str]
) -> Purpose:
    """Return the effects of running some tensors and operations.

    ``exchanges`` go by their operations' names; ``dealt`` names the iterators over datasets that are dealt out.
    """
    operations = find_ancestors(elements, fed)
    taken = sorted({number for name, number in exchanges.items() if name in operations})
    started = started_variables(graph, operations)
    assigned = [v for v in assigned_variables(graph, operations) if not any(v is other for other in started)]
    items = [one for one in operations.values() if one.type in _TAKING and holder_of(one.inputs[0]).name in dealt]
    rows = [tensor for item in items for tensor in item.outputs if tensor.shape.rank != 0]
    return Purpose(tuple(taken), tuple(started), tuple(assigned), operations, tuple(rows))


def holder_of(tensor: Any) -> Any:
    """Return the operation that created a variable's handle or reference."""
    operation = tensor.op
    while operation.type in _PASSING and operation.inputs:
        operation = operation.inputs[0].op
    return operation
