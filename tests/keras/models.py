"""Five small models, data for them, and the comparison of several workers with one; runs inside ranks.

Keras is imported inside the functions: its backend is chosen per process, by the environment of the ranks. Everything
is float64, where 10 steps of different summation orders stay within 1e-9; a wrong weight or a missed row shows at 1e-3.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nightly import amount

TOTAL_BATCH = 12
SAMPLES = 9 * TOTAL_BATCH + 3
"""Ten steps; the last batch is uneven on 2 workers, and on 4 one worker has nothing of it."""
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    build: Callable[[], Any]
    inputs: Callable[[np.random.Generator, int], Any]
    classes: int

    def data(self, count: int = SAMPLES, seed: int = 7) -> tuple[Any, Any]:
        generator = np.random.default_rng(seed)
        return self.inputs(generator, count), generator.integers(0, self.classes, count)


def _normal(*shape: int) -> Callable[[np.random.Generator, int], Any]:
    return lambda generator, count: generator.normal(size=(count, *shape))


def _words(vocabulary: int, length: int) -> Callable[[np.random.Generator, int], Any]:
    return lambda generator, count: generator.integers(0, vocabulary, (count, length)).astype("int32")


def build_mlp() -> Any:
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((40,)),
            layers.Dense(96, activation="relu"),
            layers.Dense(80, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(64, activation="relu", use_bias=False),
            layers.Dense(5),
        ]
    )


def build_cnn() -> Any:
    from keras import Input, Model, backend, layers

    is_tensorflow = backend.backend() == "tensorflow"  # elsewhere Keras has no such option, and distribute() is asked

    def normalize(x: Any) -> Any:
        return layers.BatchNormalization(**({"synchronized": True} if is_tensorflow else {}))(x)

    inputs = Input((8, 8, 3))
    x = layers.Activation("relu")(normalize(layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)))
    shortcut = normalize(layers.Conv2D(12, 1)(x))
    x = layers.add([normalize(layers.Conv2D(12, 3, padding="same")(x)), shortcut])
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    return Model(inputs, layers.Dense(6)(normalize(layers.Dense(48, activation="relu")(x))))


def build_embedding() -> Any:
    from keras import Input, Sequential, layers

    return Sequential(
        [Input((9,), dtype="int32"), layers.Embedding(5000, 16), layers.GlobalAveragePooling1D(), layers.Dense(4)]
    )


def build_lstm() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((7, 10)), layers.LSTM(12, return_sequences=True), layers.LSTM(8), layers.Dense(4)])


def build_transformer() -> Any:
    from keras import Input, Model, layers

    inputs = Input((6,), dtype="int32")
    x = layers.Embedding(50, 16)(inputs)
    x = layers.LayerNormalization()(layers.add([x, layers.MultiHeadAttention(2, 8)(x, x)]))
    hidden = layers.Dense(64, activation="gelu")(x)
    x = layers.LayerNormalization()(layers.add([x, layers.Dense(16)(hidden)]))
    return Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


CASES: dict[str, Case] = {
    "mlp": Case(build_mlp, _normal(40), 5),
    "cnn": Case(build_cnn, _normal(8, 8, 3), 6),
    "embedding": Case(build_embedding, _words(5000, 9), 4),
    "lstm": Case(build_lstm, _normal(7, 10), 4),
    "transformer": Case(build_transformer, _words(50, 6), 4),
}


ON_FOUR = amount(["mlp", "embedding"], list(CASES))
"""On four workers, where each of them compiles them all; on two they all run in the suite as well."""
ON_JAX = amount(["mlp", "cnn", "embedding"], list(CASES))
"""On JAX, which compiles each of them for seconds on every worker; the suite has them all on torch and TensorFlow."""


def begin(seed: int) -> None:
    """Let everything made from here on be float64, with weights that follow from the seed."""
    import keras

    keras.config.set_dtype_policy("float64")
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(seed)


def make_model(name: str, optimizer: Any = None, seed: int = 3, **compiled: Any) -> Any:
    """Return the model, compiled."""
    import keras

    begin(seed)
    model = CASES[name].build()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9) if optimizer is None else optimizer
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = {"metrics": ["accuracy"], **compiled}
    model.compile(optimizer=optimizer, loss=loss, **compiled)
    return model


def train(model: Any, name: str, **settings: Any) -> Any:
    """Train one epoch of ten steps, in order; ``batch_size`` is that of all workers together."""
    x, y = CASES[name].data()
    settings = {"batch_size": TOTAL_BATCH, "shuffle": False, "verbose": 0, **settings}
    return model.fit(x, y, **settings)


def difference(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    """Return the largest difference between two lists of weights."""
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True) if a.size)


def digest(weights: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(w).tobytes() for w in weights)).hexdigest()


@dataclass(frozen=True)
class Reference:
    """What one worker with all samples learns."""

    start: list[np.ndarray]
    weights: list[np.ndarray]
    logs: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """What several workers learn together, as one of them sees it."""

    weights: list[np.ndarray]
    logs: dict[str, float]
    routes: dict[str, str]
    summary: str


def train_alone(names: Iterable[str] = CASES) -> dict[str, Reference]:
    """Train models on one worker with all samples."""
    return {name: _train_alone(name) for name in names}


def _train_alone(name: str) -> Reference:
    model = make_model(name)
    start = model.get_weights()
    return Reference(start, logs=_last(train(model, name)), weights=model.get_weights())


def train_together(names: Iterable[str] = CASES, **options: Any) -> dict[str, Outcome]:
    """Train models on all workers, which start from different weights."""
    return {name: _train_together(name, **options) for name in names}


def _train_together(name: str, **options: Any) -> Outcome:
    import poseidon.keras

    model = make_model(name, seed=3 + int(os.environ["RANK"]))
    distributed = poseidon.keras.distribute(model, batch="total", **options)
    logs = _last(train(model, name))
    routes = dict(distributed.plan.routes) if distributed.plan is not None else {}
    summary = distributed.summary()
    distributed.close()
    return Outcome(model.get_weights(), logs, routes, summary)


def assert_equal(outcomes: list[Outcome], reference: Reference) -> None:
    """All metrics and weights are those of one worker with all samples, and the replicas are identical."""
    weights = outcomes[0].weights
    assert difference(reference.start, weights) > 1e-3, "nothing was learned"
    assert difference(reference.weights, weights) < TOLERANCE
    assert len({digest(outcome.weights) for outcome in outcomes}) == 1
    for outcome in outcomes:
        for key, value in reference.logs.items():
            assert abs(outcome.logs[key] - value) < TOLERANCE, key


def _last(history: Any) -> dict[str, float]:
    return {key: values[-1] for key, values in history.history.items()}
