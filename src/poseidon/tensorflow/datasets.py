"""tf.data pipelines for training: each worker gets its part of every batch, however the pipeline was built.

All workers build the same pipeline with the same seeds; each takes its part at the end, where an iterator is created.
With ``--batch per-worker`` one batch per worker is joined first, so that each gets a batch of the script's size. The
end of an epoch is split as evenly as possible, and sample counts weight the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, iterator_ops
from tensorflow.python.framework import tensor_util

from poseidon.following.naming import find_name, is_called_by_keras
from poseidon.following.options import AutoOptions
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.tensorflow.graphs import length_of

_EVALUATION_WORDS = ("val", "test", "eval", "dev")
_BATCHES = ("_BatchDataset", "_ParallelBatchDataset")
_TRAINING = ("_ShuffleDataset", "_RepeatDataset")


class Datasets:
    """Replaces how graphs take datasets."""

    def __init__(self, rank: int, size: int, options: AutoOptions, report: ScriptReport) -> None:
        self._rank = rank
        self._size = size
        self._options = options
        self._report = report
        self.rows = 1
        """Rows of the last batch of an eager loop."""
        self.on_loop: Callable[[bool | None], None] = lambda _: None
        """Called when an eager loop begins, with whether it is dealt out, and with None when it ends."""
        self._dealt: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

    def dealt(self, graph: Any) -> set[str]:
        """Return the names of a graph's iterators over datasets that are dealt out."""
        return self._dealt.setdefault(graph, set())

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        patches.wrap(dataset_ops.DatasetV1, "_make_one_shot_iterator", self._iterate)
        patches.wrap(dataset_ops.DatasetV1, "_make_initializable_iterator", self._iterate)
        patches.wrap(iterator_ops.Iterator, "make_initializer", self._initialize)
        patches.wrap(dataset_ops.DatasetV2, "__iter__", self._loop)

    def deal(self, dataset: Any) -> Any:
        """Return this worker's part of a dataset, or all of it if it is not for training."""
        # Graphs wrap their datasets; the script may hold either form.
        name = find_name(dataset) or find_name(getattr(dataset, "_dataset", None) or dataset)
        label = name or "a dataset"
        if not self._is_for_training(dataset, name):
            self._report.say(f"{label}: whole on every worker (not shuffled or repeated, or named as for evaluation)")
            return dataset
        batch = find_batch_size(dataset)
        has_rows = all(_has_rows(spec) for spec in tf.nest.flatten(dataset.element_spec))
        if self._options.batch == "total" and has_rows and is_batched(dataset):
            self._report.say(f"{label}: dealt out, each batch divided between {self._size} workers")
            return self._cut(dataset, None)
        if self._options.batch == "total":
            self._report.say(f"{label}: whole on every worker; --batch total divides only batches of one shape")
            return dataset
        if any(type(step).__name__ == "_TakeDataset" for step in pipeline(dataset)):
            self._report.say(
                f"{label}: take() counts the script's batches, so each worker makes 1 / {self._size} as many steps; "
                "with --batch total (POSEIDON_AUTO='--batch total') it makes them all, on divided batches"
            )
        if batch is not None and has_rows:
            self._report.say(f"{label}: dealt out, batches of {batch} ({batch * self._size} in all)")
            is_full = all(length_of(spec) is not None for spec in tf.nest.flatten(dataset.element_spec))
            return self._cut(dataset.rebatch(batch * self._size, drop_remainder=is_full), batch if is_full else None)
        self._report.say(f"{label}: dealt out by turns; an incomplete round at the end is left out")
        return self._take_turns(dataset)

    def _iterate(self, original: Callable[..., Any], dataset: Any, *args: Any, **kwargs: Any) -> Any:
        mine = self.deal(dataset)
        iterator = original(dataset_ops.DatasetV1Adapter(mine), *args, **kwargs)
        self._note(iterator, mine is not dataset)
        return iterator

    def _initialize(self, original: Callable[..., Any], iterator: Any, dataset: Any, *args: Any, **kw: Any) -> Any:
        mine = self.deal(dataset)
        self._note(iterator, mine is not dataset)
        return original(iterator, mine, *args, **kw)

    def _note(self, iterator: Any, is_dealt: bool) -> None:
        if is_dealt:
            operation = iterator._iterator_resource.op
            self.dealt(operation.graph).add(operation.name)

    def _loop(self, original: Callable[..., Any], dataset: Any) -> Any:
        if not tf.executing_eagerly() or is_called_by_keras():
            return original(dataset)
        mine = self.deal(dataset)
        self.on_loop(mine is not dataset)
        return self._counted(original(mine))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            first = next((leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)), None)
            self.rows = int(first.shape[0]) if first is not None and first.shape.rank else 1
            yield batch
        self.on_loop(None)

    def _is_for_training(self, dataset: Any, name: str | None) -> bool:
        if name in self._options.whole:
            return False
        if name in self._options.deal:
            return True
        is_evaluation = name is not None and any(word in name.lower() for word in _EVALUATION_WORDS)
        return not is_evaluation and any(type(step).__name__ in _TRAINING for step in pipeline(dataset))

    def _cut(self, dataset: Any, rows: int | None) -> Any:
        """Return a dataset of this worker's rows; all workers keep a batch that is too small to divide."""

        def cut(*element: Any) -> Any:
            count = tf.shape(tf.nest.flatten(element)[0])[0]
            start = tf.where(count < self._size, 0, self._rank * count // self._size)
            stop = tf.where(count < self._size, count, (self._rank + 1) * count // self._size)
            parts = tf.nest.map_structure(lambda tensor: _slice(tensor, start, stop, rows), element)
            return parts if len(element) > 1 else parts[0]

        return dataset.map(cut)

    def _take_turns(self, dataset: Any) -> Any:
        def mine(*windows: Any) -> Any:
            joined = tf.data.Dataset.zip(windows if len(windows) > 1 else windows[0])
            return joined.skip(self._rank).take(1)

        return dataset.window(self._size, drop_remainder=True).flat_map(mine)


def pipeline(dataset: Any) -> Iterator[Any]:
    """Yield the steps of a pipeline, the last one first."""
    waiting = [dataset]
    while waiting:
        step = waiting.pop()
        yield step
        waiting += [step._dataset] if isinstance(step, dataset_ops.DatasetV1Adapter) else step._inputs()


def is_batched(dataset: Any) -> bool:
    """Return whether elements are batches."""
    return any("BatchDataset" in type(step).__name__ for step in pipeline(dataset))


def find_batch_size(dataset: Any) -> int | None:
    """Return the size of the batches, if it is fixed, known, and the batches can be joined."""
    for step in pipeline(dataset):
        if type(step).__name__ in _BATCHES:
            size = tensor_util.constant_value(step._batch_size)
            return None if size is None else int(size)
    return None


def _has_rows(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank)


def _slice(tensor: Any, start: Any, stop: Any, rows: int | None) -> Any:
    part = tensor[start:stop]
    part.set_shape([rows, *tensor.shape.as_list()[1:]])
    return part
