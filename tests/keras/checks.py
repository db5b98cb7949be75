"""Checks that run inside two ranks on torch and on JAX: each trains alone on worker 0, then together, and compares."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
from models import CASES

from twins import slow_cluster

Step = Callable[[Any, Any], Any]


START: dict[str, Any] = {"timeout_s": 800, "preload": ["without_tensorflow", "poseidon.keras"]}
"""How ranks are started for these checks."""


def exactness(**options: Any) -> dict[str, models.Outcome]:
    return models.train_together(sync_batchnorm=True, **options)


def both(build: Callable[[int], Any], feed: Callable[[Any, int], None], **options: Any) -> tuple[float, str, Any]:
    """Train alone on worker 0, then together; ``feed(model, workers)`` runs fit. Return difference, digest, routes."""
    import poseidon.keras

    rank = int(os.environ["RANK"])
    alone = build(3)
    if rank == 0:
        feed(alone, 1)
    model = build(3 + rank)
    distributed = poseidon.keras.distribute(model, **{"cluster": slow_cluster(), **options})
    feed(model, 2)
    weights = model.get_weights()
    assert distributed.plan is not None
    routes = distributed.plan.routes
    distributed.verify_replicas()
    distributed.close()
    return (models.difference(alone.get_weights(), weights) if rank == 0 else 0.0), models.digest(weights), routes


def assert_exact(workers: Any, name: str, tolerance: float = models.TOLERANCE) -> None:
    outcomes = [worker[name] for worker in workers]
    assert outcomes[0][0] < tolerance
    assert len({digest for _, digest, _ in outcomes}) == 1


def datasets_and_adam() -> Any:
    """Batches of a PyDataset, one per worker, in two epochs; clipping, accumulation and Adam."""
    import keras

    class Pairs(keras.utils.PyDataset):  # type: ignore[misc]
        def __init__(self, size: int) -> None:
            super().__init__()
            self.x, self.y = CASES["embedding"].data(53)
            self.size = size

        def __len__(self) -> int:
            return -(-53 // self.size)

        def __getitem__(self, index: int) -> Any:
            part = slice(index * self.size, (index + 1) * self.size)
            return self.x[part], self.y[part]

    def build(seed: int) -> Any:
        optimizer = keras.optimizers.Adam(1e-3, clipnorm=0.5, gradient_accumulation_steps=2)
        return models.make_model("embedding", seed=seed, optimizer=optimizer)

    return both(build, lambda model, workers: model.fit(Pairs(16 // workers), epochs=2, shuffle=False, verbose=0))


def own_step(step: Step) -> Any:
    """A model without shapes that uses a layer twice and another not at all, with a train_step of its own."""
    import keras

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(64, activation="relu")
            self.shared = keras.layers.Dense(64)
            self.unused = keras.layers.Dense(3)
            self.last = keras.layers.Dense(5)

        def call(self, x: Any) -> Any:
            self.unused(x)
            return self.last(self.shared(self.shared(self.hidden(x))))

        train_step = step

    def build(seed: int) -> Any:
        models.begin(seed)
        model = Own()
        model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return both(build, lambda model, _: models.train(model, "mlp"), batch="total")


def make_tied(seed: int, gate: float = 1.0) -> Any:
    """Return a model that multiplies by its table as well as looking rows up in it, as far as a gate is open."""
    import keras

    models.begin(seed)

    class Tied(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(400, 8)
            self.kernel = keras.layers.Dense(8)
            self.gate = self.add_weight(shape=(), initializer=keras.initializers.Constant(gate), trainable=False)

        def build(self, shape: Any) -> None:
            self.table.build(shape)
            self.kernel.build((*shape, 8))

        def call(self, numbers: Any) -> Any:
            rows = keras.ops.mean(self.kernel(self.table(numbers)), axis=1)
            return keras.ops.matmul(rows, keras.ops.transpose(self.table.embeddings)) * self.gate + rows[:, :1]

    model = keras.Sequential([keras.Input((9,), dtype="int32"), Tied()])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def tied_data(count: int = 30) -> tuple[Any, Any]:
    generator = np.random.default_rng(1)
    return generator.integers(0, 400, (count, 9)).astype("int32"), generator.integers(0, 400, count)


def tied() -> Any:
    def feed(model: Any, workers: int) -> None:
        del workers
        model.fit(*tied_data(), batch_size=8, shuffle=False, verbose=0)

    return both(make_tied, feed, batch="total")


def files_and_layers(folder: Path) -> Any:
    """Who writes what, what is logged, and what is left in the model after close()."""
    import keras

    import poseidon.keras

    rank = int(os.environ["RANK"])
    model = models.make_model("mlp", seed=3 + rank)
    distributed = poseidon.keras.distribute(model)
    mine = folder / f"worker{rank}"
    mine.mkdir()
    checkpoint = keras.callbacks.ModelCheckpoint(mine / "best.keras", monitor="val_loss")
    settings = {"batch_size": 10, "validation_split": 0.2, "verbose": 0}
    history = model.fit(*CASES["mlp"].data(60), epochs=2, callbacks=[checkpoint], **settings)
    model.save(mine / "last.keras")
    distributed.close()
    left = [name for name in ("train_step", "make_train_function", "fit") if name in vars(model)]
    left += [layer.name for layer in model.layers if "call" in vars(layer)]
    if rank == 0:  # alone again: nobody is waited for
        model.fit(*CASES["mlp"].data(20), **settings)
        again = keras.saving.load_model(mine / "last.keras")
        again.fit(*CASES["mlp"].data(20), **settings)
    return sorted(path.name for path in mine.iterdir()), history.history, left


def assert_files_and_layers(workers: Any) -> None:
    (files, logs, left), (others_files, others_logs, others_left) = (worker["files_and_layers"] for worker in workers)
    assert files == ["best.keras", "last.keras"]
    assert others_files == []
    assert logs == others_logs
    assert len(logs["val_loss"]) == 2
    assert left == others_left == []


def half_precision() -> Any:
    """Train in bfloat16 and in float16 with a scaled loss; return losses and routes, if the replicas are identical."""
    import keras

    import poseidon.keras

    found = []
    for policy in ("mixed_bfloat16", "mixed_float16"):
        models.begin(3)
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
        layers = [keras.layers.Embedding(500, 16), keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
        model = keras.Sequential([keras.Input((9,), dtype="int32"), *layers, keras.layers.Dense(4, dtype="float32")])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        distributed = poseidon.keras.distribute(model, cluster=slow_cluster())
        x, y = CASES["embedding"].data(30)
        history = model.fit(x % 500, y, batch_size=5, epochs=2, verbose=0)
        distributed.verify_replicas()
        assert distributed.plan is not None
        found.append((history.history["loss"], sorted(set(distributed.plan.routes.values()))))
        distributed.close()
    return found


def assert_half_precision(workers: Any) -> None:
    mine, theirs = (worker["half_precision"] for worker in workers)
    assert mine == theirs
    assert all(losses[1] < losses[0] < 2.0 for losses, _ in mine)
    # Keras on torch does not multiply float16 on a CPU, so that has no factors there.
    assert {"factors", "rows"} <= set(mine[0][1])
    assert "rows" in mine[1][1]
