"""Models with several inputs, outputs or optimizers, and training steps of their own; runs inside ranks.

Each is trained alone and then together, in batches that do not divide evenly. Noise, where a model needs some, is part
of its data: workers draw differently.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import models
import numpy as np

COUNT, BATCH = 31, 7
"""Samples and batch size: the last batch has 3."""


def compare(build: Callable[[int], Any], feed: Callable[[Any], Any], **options: Any) -> tuple[float, float, str, Any]:
    """Train alone on worker 0, and together; return the differences of weights and of logs, a digest, and the logs."""
    import poseidon.keras

    rank = int(os.environ["RANK"])
    alone = build(3)
    expected = feed(alone).history if rank == 0 else {}
    model = build(3 + rank)
    distributed = poseidon.keras.distribute(model, batch="total", **options)
    found = feed(model).history
    distributed.verify_replicas()
    weights = model.get_weights()
    distributed.close()
    digest = models.digest(weights)
    if rank != 0:
        return 0.0, 0.0, digest, found
    assert found.keys() == expected.keys()
    logs = max(float(np.abs(np.subtract(found[key], expected[key])).max()) for key in found)
    assert max(abs(values[0] - values[-1]) for values in expected.values()) > 1e-4, "nothing was learned"
    return models.difference(alone.get_weights(), weights), logs, digest, found


def assert_equal(workers: Any, name: str, tolerance: float = models.TOLERANCE) -> None:
    """Weights and logs are those of one worker, and the replicas are identical."""
    (weights, logs, *mine), *others = (worker[name] for worker in workers)
    assert weights < tolerance
    assert logs < tolerance
    for _, _, *theirs in others:
        assert theirs == mine, "digests and logs"


def make_branches(seed: int, is_named: bool = True) -> Any:
    """Return a functional model of two inputs and two outputs."""
    import keras

    models.begin(seed)
    left, right = keras.Input((6,), name="left"), keras.Input((4,), name="right")
    joined = keras.layers.concatenate([keras.layers.Dense(8, activation="tanh")(left), right])
    first = keras.layers.Dense(3, name="first")(joined)
    second = keras.layers.Dense(1, name="second")(joined)
    inputs = {"left": left, "right": right} if is_named else [left, right]
    outputs = {"first": first, "second": second} if is_named else [first, second]
    model = keras.Model(inputs, outputs)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if is_named:
        losses, metrics = {"first": cross_entropy, "second": "mse"}, {"first": ["accuracy"], "second": ["mae"]}
        model.compile(keras.optimizers.SGD(0.1), losses, metrics=metrics, weighted_metrics={"second": ["mse"]})
    else:
        model.compile(keras.optimizers.SGD(0.1), [cross_entropy, "mse"], metrics=[["accuracy"], ["mae"]])
    return model


def branch_data() -> tuple[Any, Any, Any, Any, Any]:
    generator = np.random.default_rng(2)
    inputs = generator.normal(size=(COUNT, 6)), generator.normal(size=(COUNT, 4))
    return *inputs, generator.integers(0, 3, COUNT), generator.normal(size=(COUNT, 1)), generator.uniform(size=COUNT)


TURNS = ("discriminator", "discriminator", "generator")
"""Which of two adversaries learns, in one step."""

SETTINGS: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}


def lists() -> Any:
    """Lists of inputs and outputs, with a part split off for validation."""
    a, b, first, second, _ = branch_data()
    return compare(
        lambda seed: make_branches(seed, is_named=False),
        lambda model: model.fit([a, b], [first, second], validation_split=0.2, **SETTINGS),
    )


def dictionaries() -> Any:
    """Inputs, outputs and weights of samples by name."""
    a, b, first, second, weight = branch_data()

    def feed(model: Any) -> Any:
        outputs = {"first": first, "second": second}
        weights = {"first": weight, "second": weight[::-1]}
        return model.fit({"left": a, "right": b}, outputs, sample_weight=weights, **SETTINGS)

    return compare(make_branches, feed)


def batches() -> Any:
    """The same from a PyDataset and from a generator."""
    import keras

    a, b, first, second, _ = branch_data()

    class Pairs(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return -(-COUNT // BATCH)

        def __getitem__(self, index: int) -> Any:
            part = slice(index * BATCH, (index + 1) * BATCH)
            return (a[part], b[part]), (first[part], second[part])

    def generate() -> Any:
        for index in range(len(Pairs())):
            yield Pairs()[index]

    def feed(model: Any) -> Any:
        first = model.fit(Pairs(), epochs=2, shuffle=False, verbose=0)
        model.fit(generate(), verbose=0)
        return first

    return compare(lambda seed: make_branches(seed, is_named=False), feed)


def autoencoder(step: Callable[[Any, Any], Any]) -> Any:
    """A variational autoencoder without call(), whose loss and metrics are its own; its parts have no shapes yet."""
    import keras

    class Autoencoder(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = keras.Sequential([keras.layers.Dense(12, activation="tanh"), keras.layers.Dense(4)])
            self.decoder = keras.Sequential([keras.layers.Dense(12, activation="tanh"), keras.layers.Dense(6)])
            self.tracked = [keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="kl")]

        @property
        def metrics(self) -> list[Any]:
            return self.tracked

        def losses_of(self, data: Any) -> tuple[Any, Any]:
            """Return reconstruction and divergence; the last two columns of the data are the noise."""
            mean, spread = keras.ops.split(self.encoder(data[:, :6]), 2, axis=1)
            code = mean + keras.ops.exp(0.5 * spread) * data[:, 6:]
            error = keras.ops.mean(keras.ops.sum(keras.ops.square(self.decoder(code) - data[:, :6]), axis=1))
            divergence = -0.5 * (1 + spread - keras.ops.square(mean) - keras.ops.exp(spread))
            return error, keras.ops.mean(keras.ops.sum(divergence, axis=1))

        train_step = step

    def build(seed: int) -> Any:
        models.begin(seed)
        model = Autoencoder()
        if keras.backend.backend() != "tensorflow":  # elsewhere Keras itself wants it built
            model.encoder.build((None, 6))
            model.decoder.build((None, 2))
            model.built = True
        model.compile(optimizer=keras.optimizers.SGD(0.05))
        return model

    def feed(model: Any) -> Any:
        return model.fit(np.random.default_rng(4).normal(size=(COUNT, 8)), **SETTINGS)

    return compare(build, feed)


def adversaries(step: Callable[[Any, Any], Any]) -> Any:
    """A generator and a discriminator with an optimizer each, besides the one that compile() makes unasked.

    The discriminator learns twice in each step.
    """
    import keras

    class Adversaries(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.generator = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(5)]
            )
            self.discriminator = keras.Sequential(
                [keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
            )
            self.tracked = {name: keras.metrics.Mean(name=name) for name in set(TURNS)}
            self.built = True

        def compile(self, optimizers: Any, loss: Any) -> None:
            super().compile()
            self.optimizers, self.loss_of = optimizers, loss

        @property
        def metrics(self) -> list[Any]:
            return [self.tracked[name] for name in sorted(self.tracked)]

        def loss_for(self, name: str, data: Any) -> Any:
            """Return the loss of one of the two; the last columns of the data are the noise."""
            made = self.generator(data[:, 5:])
            if name == "generator":
                return self.judge(made, True)
            return self.judge(data[:, :5], True) + self.judge(made, False)

        def judge(self, pictures: Any, is_real: bool) -> Any:
            verdict = self.discriminator(pictures)
            return self.loss_of(keras.ops.full_like(verdict, float(is_real)), verdict)

        train_step = step

    def build(seed: int) -> Any:
        models.begin(seed)
        model = Adversaries()
        optimizers = {"generator": keras.optimizers.SGD(0.1), "discriminator": keras.optimizers.SGD(0.2)}
        model.compile(optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    return compare(build, lambda model: model.fit(np.random.default_rng(4).normal(size=(COUNT, 8)), **SETTINGS))
