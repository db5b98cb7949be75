"""The arguments of ``fit`` that hold data, and how each kind of data is divided."""

from __future__ import annotations

import types
from typing import Any

import keras

from poseidon.errors import ConfigError, UnsupportedError
from poseidon.keras.batches import (
    Batch,
    BatchDeal,
    DealtArrays,
    DealtDataset,
    DealtLoader,
    as_arrays,
    deal_tf_dataset,
    unpack,
)

_KERAS_BATCH = 32
"""Keras' default batch size."""


def deal_inputs(settings: dict[str, Any], deal: BatchDeal, seed: int, is_own: bool) -> dict[str, Any]:
    """Return arguments of ``fit`` in which the data are this worker's part; validation data stay whole.

    ``is_own`` data are not divided. ``seed``, the same on all workers, shuffles where ``fit`` would.
    """
    settings = dict(settings)
    if is_own:
        return settings
    x = settings.get("x")
    shuffle = settings.get("shuffle", True)
    if isinstance(x, keras.utils.PyDataset):
        settings["x"] = DealtDataset(x, deal, seed if shuffle else None)
    elif _is_from(x, "tensorflow", "DatasetV2"):
        settings["x"] = deal_tf_dataset(x, deal)
    elif _is_from(x, "torch", "DataLoader"):
        settings["x"] = DealtLoader(x, deal)
    elif isinstance(x, types.GeneratorType):
        settings["x"] = deal.stream(as_arrays(batch) for batch in x)
    else:
        settings = _deal_arrays(settings, deal, seed if shuffle else None)
    if settings.get("steps_per_epoch"):
        settings["steps_per_epoch"] = deal.count_batches(settings["steps_per_epoch"])
    # We have shuffled already.
    settings["shuffle"] = False
    return settings


def symbolic_batch(x: Any, y: Any) -> Batch:
    """Return the shapes and types of the model's inputs, as a batch without values."""
    return keras.tree.map_structure(_symbol, unpack(_example(x, y))[0])


def _symbol(leaf: Any) -> Any:
    return (
        None
        if leaf is None
        else keras.KerasTensor((None, *leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype))
    )


def _example(x: Any, y: Any) -> Batch:
    if isinstance(x, keras.utils.PyDataset):
        return x[0]
    if isinstance(x, types.GeneratorType):
        raise ConfigError(
            "the model has no weights yet, and peeking at the generator would take a batch from it; call "
            "model.build(input_shape) before fit()"
        )
    if hasattr(x, "element_spec"):
        return x.element_spec
    if _is_from(x, "torch", "DataLoader"):
        return next(iter(x))
    return keras.tree.map_structure(lambda leaf: leaf[:1], (x,) if y is None else (x, y))


def _deal_arrays(settings: dict[str, Any], deal: BatchDeal, seed: int | None) -> dict[str, Any]:
    x, y, weight = (settings.pop(name, None) for name in ("x", "y", "sample_weight"))
    _check_arrays(x)
    batch_size = settings.pop("batch_size", None) or _KERAS_BATCH
    if deal.divides and batch_size < deal.size:
        raise ConfigError(
            f'batch="total" divides batches of {batch_size} between {deal.size} workers; batch_size must be at least '
            f"{deal.size}"
        )
    data = (x, y) if weight is None else (x, y, weight)
    split = settings.pop("validation_split", 0.0)
    if split and settings.get("validation_data") is None:
        data, settings["validation_data"] = _split_off(data, split)
        settings.setdefault("validation_batch_size", batch_size)
    return {**settings, "x": DealtArrays(data if y is not None else data[:1], batch_size, deal, seed)}


def _split_off(data: tuple[Any, ...], share: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split off the last ``share`` of the samples, as Keras does; return the rest and the split-off part."""
    count = len(next(leaf for leaf in keras.tree.flatten(data) if leaf is not None))
    kept = int(count * (1.0 - share))
    if not 0 < kept < count:
        raise ConfigError(f"validation_split={share} of {count} samples leaves nothing to train or to validate with")

    def cut(part: slice) -> tuple[Any, ...]:
        cut_data: tuple[Any, ...] = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[part], data)
        return cut_data

    return cut(slice(kept)), cut(slice(kept, None))


def _check_arrays(x: Any) -> None:
    leaves = [] if x is None else [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    odd = next((leaf for leaf in leaves if not (hasattr(leaf, "shape") and hasattr(leaf, "__getitem__"))), None)
    if odd is None and leaves:
        return
    raise UnsupportedError(
        f"x is {type(odd if leaves else x).__name__}; arrays, PyDataset, tf.data.Dataset, torch DataLoader and "
        'generators can be dealt out. Give each worker its own data and pass data="own"'
    )


def _is_from(value: Any, package: str, name: str) -> bool:
    """Whether a value's class is, or derives from, a class of that name, without importing the package."""
    return any(c.__name__ == name and c.__module__.partition(".")[0] == package for c in type(value).__mro__)
