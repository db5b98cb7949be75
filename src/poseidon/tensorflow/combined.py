"""What a divided step does besides training: variables it assigns, and numbers that the script fetches with it.

Metrics, counters and moving averages are assigned from a worker's own rows. After the step every worker gets what one
worker with all rows would have: trials with parts of a batch (``probes.py``) show whether that is a sum, a mean or an
extreme of what the workers have. What the batch does not determine is left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.tensorflow.combining import ANY, LARGEST, MEAN, SMALLEST, SUM, chosen, combine, is_settled
from poseidon.tensorflow.graphs import Purpose, find_ancestors, length_of, rests_on_variables
from poseidon.tensorflow.probes import Assignment, BatchRows, can_be_tried, find_assignments, try_parts
from poseidon.tensorflow.variables import read, write

Array = np.ndarray[Any, Any]

_DECLARED = {tf.VariableAggregation.SUM: SUM, tf.VariableAggregation.MEAN: MEAN}
_TRIALS = 5
"""Trials after which what a batch never changed is taken for a sum."""


class CombinedRun:
    """The assignments and fetched numbers of one kind of run that depend on the rows of the batch."""

    def __init__(
        self,
        team: Team,
        report: ScriptReport,
        purpose: Purpose,
        fetches: Sequence[Any],
        fed: Collection[str],
        left: Collection[str],
        ways: dict[str, int],
    ) -> None:
        """``fed`` names the tensors that are fed; ``left`` the variables that follow from gradients.

        ``ways`` is what is known of the graph's variables and tensors, by name; it is added to.
        """
        self._team = team
        self._report = report
        names = {*fed, *(tensor.name for tensor in purpose.dealt)}
        candidates = [v for v in purpose.assigned if v.op.name not in left and is_number(v.dtype.base_dtype)]
        found = [one for one in find_assignments(candidates, purpose.operations) if not one.is_constant]
        # Tensors of a fixed length cannot be fed a part of their rows.
        is_open = all(length_of(tensor) is None for tensor in purpose.dealt)
        self._tried = [one for one in found if is_open and can_be_tried(one.sources, names)]
        # The script, or the library that made a metric, may have said how values of several devices are combined.
        declared = [one for one in found if one not in self._tried and one.variable.aggregation in _DECLARED]
        self.assignments = [*self._tried, *declared]
        self._ways = ways
        for one in self._tried:
            ways.setdefault(one.variable.op.name, SUM | MEAN if one.is_added else ANY)
        for one in declared:
            ways[one.variable.op.name] = _DECLARED[one.variable.aggregation]
        numbers = [tensor for tensor in fetches if is_number(tensor.dtype.base_dtype) and tensor.shape.rank == 0]
        self._numbers = [t for t in numbers if is_open and not rests_on_variables(t) and can_be_tried([t], names)]
        for tensor in self._numbers:
            ways.setdefault(tensor.name, ANY)
        self._names = [*(one.variable.op.name for one in self._tried), *(tensor.name for tensor in self._numbers)]
        self._trials = 0
        self._outputs = _outputs_of(self.assignments)
        self._after = [tensor for tensor in fetches if self._reads(tensor)]

    @property
    def is_learning(self) -> bool:
        """Whether a further trial may tell something."""
        return self._trials < _TRIALS and not all(is_settled(self._ways[name]) for name in self._names)

    @property
    def names(self) -> set[str]:
        """The variables that are combined."""
        return {one.variable.op.name for one in self.assignments}

    def way(self, tensor: Any) -> int:
        """Return how the workers' values of a fetched number are combined; 0: they are not."""
        if tensor.name in self._ways:
            return chosen(self._ways[tensor.name])
        return MEAN if tensor.dtype.is_floating else 0

    def read(self, session: Any) -> list[Array]:
        """Return the variables' values before the run."""
        return read(session, [one.variable for one in self.assignments])

    def learn(self, session: Any, batch: BatchRows) -> None:
        """Try parts of a batch; all workers get the same answer. Collective."""
        self._trials += 1
        try:
            found = [way for ways in try_parts(session, batch, self._tried, self._numbers) for way in ways]
        except (tf.errors.OpError, ValueError):  # a graph that takes batches of one size only
            found = [0] * len(self._tried) + [MEAN if tensor.dtype.is_floating else 0 for tensor in self._numbers]
        rows = self._team.gather_ints(found, "the others' trials") if found else []
        for name, column in zip(self._names, zip(*rows, strict=True), strict=True):
            for ways in column:
                self._ways[name] &= ways

    def settle(self, session: Any, before: Sequence[Array], counts: Sequence[int]) -> None:
        """Give the variables the values that one worker with all rows would have. Collective."""
        if not self.assignments:
            return
        after = read(session, [one.variable for one in self.assignments])
        mine = b"".join(np.ascontiguousarray(array).tobytes() for array in (*before, *after))
        parts = [_unpack(data, [*before, *after]) for data in self._team.gather_bytes(mine, "the others' counts")]
        half = len(after)
        changed: list[tuple[Any, Array]] = []
        for number, one in enumerate(self.assignments):
            start, ends = parts[0][number], [part[half + number] for part in parts]
            way = chosen(_informed(self._ways[one.variable.op.name], one, start, ends))
            new = _combined(way, start, ends, counts).astype(start.dtype)
            if not way and any((end != ends[0]).any() for end in ends):
                self._report.say(
                    f"{one.variable.op.name}: neither a sum nor a mean over a batch's rows; worker 0's value is kept"
                )
            if new.tobytes() != after[number].tobytes():
                changed.append((one.variable, new))
        if changed:
            write(session, [variable for variable, _ in changed], [value for _, value in changed])

    def refresh(self, session: Any, fetches: Sequence[Any], results: list[Any], feeds: Mapping[str, Any]) -> list[Any]:
        """Return fetched results in which those computed from combined variables are computed again."""
        if not self._after:
            return results
        values = dict(zip((one.variable.op.name for one in self.assignments), self.read(session), strict=True))
        given = {**feeds, **{tensor: values[variable] for tensor, variable in self._outputs.items()}}
        wanted = [tensor for tensor in self._after if can_be_tried([tensor], given)]
        found = dict(zip((tensor.name for tensor in wanted), session.run(wanted, given), strict=True)) if wanted else {}
        return [found.get(tensor.name, result) for tensor, result in zip(fetches, results, strict=True)]

    def _reads(self, tensor: Any) -> bool:
        """Return whether a fetched tensor is computed from a combined variable."""
        if not self.assignments or not is_number(tensor.dtype.base_dtype):
            return False
        operations = find_ancestors([tensor])
        after = any(name.partition(":")[0] in operations for name in self._outputs)
        return after or (rests_on_variables(tensor) and not self.names.isdisjoint(operations))


def _outputs_of(assignments: Sequence[Assignment]) -> dict[str, str]:
    """Return the names of tensors that hold a variable's value right after its assignment, with the variable's name."""
    found = {}
    for one in assignments:
        readers = [reader for reader in one.operation._control_outputs if reader.type == "ReadVariableOp"]
        for tensor in [*one.operation.outputs, *(reader.outputs[0] for reader in readers)]:
            found[tensor.name] = one.variable.op.name
    return found


def _informed(ways: int, one: Assignment, start: Array, ends: Sequence[Array]) -> int:
    """Return the possible ways, where trials after a step tell nothing: a step that is repeated changes no extreme."""
    if ways != ANY or one.is_added:
        return ways
    return LARGEST if any((end > start).any() for end in ends) else SMALLEST


def _combined(way: int, start: Array, ends: Sequence[Array], counts: Sequence[int]) -> Array:
    """Return a variable's new value, from its old one and those of all workers after the step. Pure."""
    if not way:
        return ends[0]
    if way in (LARGEST, SMALLEST):
        return combine(way, ends, counts)
    is_whole = start.dtype.kind in "iu"
    wide = np.int64 if is_whole else np.float64
    changes = [end.astype(wide) - start.astype(wide) for end in ends]
    total = start.astype(wide) + combine(way, changes, counts)
    return np.rint(total) if is_whole else total


def _unpack(data: bytes, like: Sequence[Array]) -> list[Array]:
    found, start = [], 0
    for array in like:
        found.append(np.frombuffer(data, array.dtype, array.size, start).reshape(array.shape))
        start += array.nbytes
    return found


def is_number(dtype: Any) -> bool:
    """Return whether values of a type can be added."""
    return bool(dtype.is_floating or dtype.is_integer)
