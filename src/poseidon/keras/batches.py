"""The data of ``fit``, divided: which samples of a batch are this worker's.

Every worker goes through the same batches in the same order and keeps its part. A worker that gets nothing at the end
of an epoch runs another worker's sample, which does not count. The number of samples that count travels with the batch,
hidden in its inputs, because frameworks prefetch batches on their own threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import keras
import numpy as np

Batch = Any
"""A batch as Keras takes it: ``x``, ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``."""

_SAMPLES = "poseidon_samples"


def pack(batch: Batch, samples: int) -> Batch:
    """Return the batch with the number of samples that count hidden in its inputs."""
    # tf.data would make one tensor of a list; Keras takes tuples for lists of inputs and outputs.
    x, *rest = keras.tree.lists_to_tuples(batch) if isinstance(batch, tuple) else (batch,)
    return ({_SAMPLES: np.array([samples], np.int32), "x": x}, *rest)


def unpack(batch: Batch) -> tuple[Batch, Any]:
    """Return the batch as the model expects it and the number of samples that count, in an array of one.

    The number is None for a batch that :func:`pack` did not make: all its samples count.
    """
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    if not (isinstance(x, dict) and _SAMPLES in x):
        return batch, None
    return keras.utils.pack_x_y_sample_weight(x["x"], y, weight), x[_SAMPLES]


def count_rows(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return int(next(leaf.shape[0] for leaf in keras.tree.flatten(batch) if leaf is not None))


@dataclass(frozen=True)
class BatchDeal:
    """How batches are divided between ``size`` workers; this one is ``rank``. Pure."""

    rank: int
    size: int
    divides: bool
    """Split each batch between the workers, instead of giving each worker its own batch."""

    def part(self, count: int) -> tuple[slice, int]:
        """Return this worker's share of ``count`` samples, never empty, and how many of them count."""
        start, stop = self.rank * count // self.size, (self.rank + 1) * count // self.size
        return (slice(start, stop), stop - start) if stop > start else (slice(0, 1), 0)

    def count_batches(self, batches: int) -> int:
        """Return how many batches each worker gets of that many."""
        return batches if self.divides else math.ceil(batches / self.size)

    def stream(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this worker's parts of a stream of batches, packed."""
        source = iter(batches)
        while group := list(islice(source, 1 if self.divides else self.size)):
            yield self.of_group(group)

    def of_group(self, group: list[Batch]) -> Batch:
        """Return this worker's part, packed, of the batches of one step."""
        if len(group) == self.size and not self.divides:
            mine = group[self.rank]
            return pack(mine, count_rows(mine))
        if not _are_joinable(group):
            # Each of the first workers has a whole batch, and the others none that counts.
            mine = group[self.rank] if self.rank < len(group) else group[0]
            rows = count_rows(mine) if self.rank < len(group) else 1
            return pack(_rows_of(mine, slice(0, rows)), rows if self.rank < len(group) else 0)
        whole = group[0] if len(group) == 1 else keras.tree.map_structure(_join, *group)
        part, samples = self.part(count_rows(whole))
        return pack(_rows_of(whole, part), samples)


def _rows_of(batch: Batch, part: slice) -> Batch:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[part], batch)


def _are_joinable(group: list[Batch]) -> bool:
    """Whether samples of all batches have the same shapes, which those that are padded batch by batch have not."""
    shapes = {tuple(leaf.shape[1:] for leaf in keras.tree.flatten(batch) if leaf is not None) for batch in group}
    return len(shapes) == 1


def _join(*leaves: Any) -> Any:
    return None if leaves[0] is None else np.concatenate([np.asarray(leaf) for leaf in leaves])


class _Ordered(keras.utils.PyDataset):  # type: ignore[misc]
    """Numbered items that each pass may visit in another order, the same on all workers."""

    def __init__(self, count: int, seed: int | None, workers: int = 1) -> None:
        super().__init__(workers=workers)
        self._count = count
        self._seed = seed
        self._passes = 0
        self._order = np.arange(count)

    def _begin_if_first(self, index: int) -> None:
        # Not in on_epoch_end: with prefetching that call comes at an arbitrary point of a pass.
        if index == 0 and self._seed is not None:
            self._order = np.random.default_rng([self._seed, self._passes]).permutation(self._count)
            self._passes += 1


class DealtArrays(_Ordered):
    """One worker's parts of arrays, as batches; ``seed`` shuffles, None keeps the order."""

    def __init__(self, data: tuple[Any, ...], batch_size: int, deal: BatchDeal, seed: int | None) -> None:
        self._data = keras.tree.map_structure(_as_array, data)
        super().__init__(count_rows(self._data), seed)
        self._deal = deal
        self._block = batch_size if deal.divides else batch_size * deal.size

    @property
    def num_batches(self) -> int:
        """Steps of one pass."""
        return math.ceil(self._count / self._block)

    def __getitem__(self, index: int) -> Batch:
        self._begin_if_first(index)
        block = self._order[index * self._block : (index + 1) * self._block]
        part, samples = self._deal.part(len(block))
        rows = block[part]
        return pack(keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], self._data), samples)


def _as_array(leaf: Any) -> Any:
    if leaf is None:
        return None
    array = leaf.to_numpy() if hasattr(leaf, "to_numpy") else keras.ops.convert_to_numpy(leaf)
    # As Keras does with arrays.
    return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array


class DealtDataset(_Ordered):
    """One worker's parts of the batches of a ``PyDataset``."""

    def __init__(self, source: Any, deal: BatchDeal, seed: int | None) -> None:
        self._source = source
        self._deal = deal
        self._is_endless = source.num_batches is None
        super().__init__(source.num_batches or 0, None if self._is_endless else seed, workers=source.workers)

    @property
    def num_batches(self) -> int | None:
        """Steps of one pass; None if it is endless."""
        return None if self._is_endless else self._deal.count_batches(self._count)

    def __getitem__(self, index: int) -> Batch:
        self._begin_if_first(index)
        if self._deal.divides:
            return self._deal.of_group([self._load(index)])
        start = index * self._deal.size
        if self._is_endless or start + self._deal.size <= self._count:
            # If every worker has a batch, load only this worker's.
            mine = self._load(start + self._deal.rank)
            return pack(mine, count_rows(mine))
        return self._deal.of_group([self._load(number) for number in range(start, self._count)])

    def on_epoch_begin(self) -> None:
        """Pass it on."""
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Pass it on."""
        self._source.on_epoch_end()

    def _load(self, number: int) -> Batch:
        batch = self._source[number if self._is_endless else int(self._order[number])]
        return tuple(batch) if isinstance(batch, list) else batch


class DealtLoader(_Ordered):
    """One worker's parts of the batches of a sized iterable, such as a torch ``DataLoader``."""

    def __init__(self, source: Any, deal: BatchDeal) -> None:
        super().__init__(len(source), None)
        self._source = source
        self._deal = deal
        self._pass: Iterator[Batch] = iter(())

    @property
    def num_batches(self) -> int:
        """Steps of one pass."""
        return self._deal.count_batches(self._count)

    def __getitem__(self, index: int) -> Batch:
        if index == 0:
            self._pass = self._deal.stream(as_arrays(batch) for batch in self._source)
        return next(self._pass)


def as_arrays(batch: Batch) -> Batch:
    """Return a batch of numpy arrays."""
    batch = tuple(batch) if isinstance(batch, list) else batch
    return keras.tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf), batch)


def deal_tf_dataset(source: Any, deal: BatchDeal) -> Any:
    """Return a ``tf.data.Dataset`` of this worker's parts of a dataset's batches."""
    import tensorflow as tf

    spec = keras.tree.map_structure(_unsized, source.element_spec)
    x, *rest = spec if isinstance(spec, tuple) else (spec,)
    signature = ({_SAMPLES: tf.TensorSpec((1,), tf.int32), "x": x}, *rest)
    dealt = tf.data.Dataset.from_generator(lambda: deal.stream(source), output_signature=signature)
    count = int(source.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        dealt = dealt.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    elif count >= 0:
        dealt = dealt.apply(tf.data.experimental.assert_cardinality(deal.count_batches(count)))
    return dealt.prefetch(2)


def _unsized(spec: Any) -> Any:
    import tensorflow as tf

    from poseidon.errors import UnsupportedError

    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank in (None, 0):
        raise UnsupportedError(
            f"the dataset has elements of {spec}; only batches of dense tensors can be dealt out. Shard the dataset "
            'yourself and pass data="own"'
        )
    return tf.TensorSpec((None, *spec.shape[1:]), spec.dtype)
