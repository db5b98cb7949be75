"""Keras on TensorFlow, several workers against one; each set of workers is started once for many checks."""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import models
import numpy as np
import own_models
import pytest
from models import CASES, TOLERANCE

from nightly import amount
from ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(1000),
]

LIMIT_S = 900.0

ENV = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


START = {"timeout_s": LIMIT_S, "env": ENV, "preload": ["tensorflow", "keras", "poseidon.keras"]}


def _alone() -> dict[str, models.Reference]:
    _use_one_thread()
    return models.train_alone()


def _together(options: dict[str, Any]) -> dict[str, models.Outcome]:
    _use_one_thread()
    return models.train_together(**options)


def _use_one_thread() -> None:
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(1)


@pytest.fixture(scope="module")
def alone() -> Any:
    """Results of all models on one worker with all samples."""
    return run_ranks(_alone, 1, **START)[0]


@pytest.fixture(scope="module")
def two() -> Any:
    """Results of all models on 2 workers, whose Dense layers must send factors."""
    return run_ranks(_together, 2, {"routes": {"*": "factors"}}, **START)


@pytest.fixture(scope="module")
def four() -> Any:
    """Results of models on 4 workers, where the plan decides."""
    return run_ranks(_together, 4, {"names": models.ON_FOUR}, **START)


@pytest.mark.parametrize(
    ("size", "name"), [*[("two", name) for name in CASES], *[("four", name) for name in models.ON_FOUR]]
)
def test_equals_one_worker_with_all_samples(request: Any, alone: Any, name: str, size: str) -> None:
    models.assert_equal([worker[name] for worker in request.getfixturevalue(size)], alone[name])


def test_routes_are_those_of_the_plan(two: Any) -> None:
    # Of four kernels one has a penalty, so its gradient is no pure product.
    assert list(two[0]["mlp"].routes.values()).count("factors") == 3
    assert "rows" in two[0]["embedding"].routes.values()
    assert "during backward" in two[0]["mlp"].summary


# Everything else on two workers.


def _behaviours(folder: str) -> dict[str, Any]:
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(2)
    checks = [value for name, value in globals().items() if name.startswith("_check_")]
    results = {}
    for check in checks:
        results[check.__name__.removeprefix("_check_")] = check(Path(folder))
    return results


@pytest.fixture(scope="module")
def behaviours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(_behaviours, 2, str(tmp_path_factory.mktemp("keras")), **START)


def _both(build: Any, feed: Any, **options: Any) -> tuple[float, str]:
    """Train alone on worker 0, then together; ``feed(model, workers)`` runs fit. Return difference and digest."""
    import poseidon.keras

    rank = int(os.environ["RANK"])
    alone = build(3)
    if rank == 0:
        feed(alone, 1)
    model = build(3 + rank)
    distributed = poseidon.keras.distribute(model, **options)
    feed(model, 2)
    weights = model.get_weights()
    distributed.close()
    return (models.difference(alone.get_weights(), weights) if rank == 0 else 0.0), models.digest(weights)


def _assert_exact(behaviours: Any, name: str, tolerance: float = TOLERANCE) -> None:
    outcomes = [worker[name] for worker in behaviours]
    assert outcomes[0][0] < tolerance
    assert len({digest for _, digest in outcomes}) == 1


def _mlp(seed: int, **compiled: Any) -> Any:
    return models.make_model("mlp", seed=seed, **compiled)


def _check_batch_per_worker(folder: Path) -> Any:
    def feed(model: Any, workers: int) -> None:
        x, y = CASES["mlp"].data(61)
        model.fit(x, y, batch_size=16 // workers, epochs=2, shuffle=False, verbose=0)

    return _both(_mlp, feed)


def test_a_batch_size_counts_one_workers_samples(behaviours: Any) -> None:
    _assert_exact(behaviours, "batch_per_worker")


def _check_tf_data(folder: Path) -> Any:
    import keras
    import tensorflow as tf

    def feed(model: Any, workers: int) -> None:
        keras.utils.set_random_seed(9)  # which all workers must do alike for their datasets to be in the same order
        # In one order for both epochs: how often Keras makes an iterator, which reshuffles, is its own affair.
        samples = tf.data.Dataset.from_tensor_slices(CASES["mlp"].data(61))
        dataset = samples.shuffle(61, seed=5, reshuffle_each_iteration=False).batch(16 // workers)
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)

    return _both(_mlp, feed)


def test_tf_data_is_dealt_out(behaviours: Any) -> None:
    _assert_exact(behaviours, "tf_data")


def _check_py_dataset(folder: Path) -> Any:
    import keras

    class Pairs(keras.utils.PyDataset):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.x, self.y = CASES["mlp"].data(61)
            self.size = size

        def __len__(self) -> int:
            return -(-61 // self.size)

        def __getitem__(self, index: int) -> Any:
            part = slice(index * self.size, (index + 1) * self.size)
            return self.x[part], self.y[part]

    return _both(_mlp, lambda model, workers: model.fit(Pairs(16 // workers), epochs=2, shuffle=False, verbose=0))


def test_a_py_dataset_is_dealt_out(behaviours: Any) -> None:
    _assert_exact(behaviours, "py_dataset")


def _check_overlap(folder: Path) -> Any:
    import keras
    import tensorflow as tf

    import poseidon.keras
    from poseidon.engine.outside import OutsideFrontEnd

    has_left = threading.Event()
    waited: list[bool] = []
    give_factors = OutsideFrontEnd.give_factors

    def give_and_tell(self: Any, position: int, pairs: Any) -> None:
        give_factors(self, position, pairs)
        has_left.set()

    def wait(gradient: Any) -> Any:
        waited.append(has_left.wait(60.0))
        return gradient

    class Patient(keras.layers.Layer):
        """Its backward does not go on before a gradient of a layer above has left."""

        def call(self, x: Any) -> Any:
            @tf.custom_gradient
            def identity(x: Any) -> Any:
                def backward(gradient: Any) -> Any:
                    result = tf.numpy_function(wait, [gradient], gradient.dtype)
                    result.set_shape(gradient.shape)
                    return result

                return tf.identity(x), backward

            return identity(x)

    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(8), Patient(), keras.layers.Dense(5)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    distributed = poseidon.keras.distribute(model)
    OutsideFrontEnd.give_factors = give_and_tell  # type: ignore[method-assign]
    model.fit(*CASES["mlp"].data(8), batch_size=4, verbose=0)
    OutsideFrontEnd.give_factors = give_factors  # type: ignore[method-assign]
    distributed.close()
    return waited


def test_gradients_leave_while_backward_goes_on(behaviours: Any) -> None:
    assert all(worker["overlap"] == [True] for worker in behaviours)


def _check_steps_per_execution(folder: Path) -> Any:
    import keras

    def build(seed: int) -> Any:
        optimizer = keras.optimizers.Adam(1e-3, clipnorm=0.5, gradient_accumulation_steps=2)
        return _mlp(seed, optimizer=optimizer, steps_per_execution=3)

    return _both(build, lambda model, _: models.train(model, "mlp"), batch="total")


def test_clipping_accumulation_and_several_steps_at_once(behaviours: Any) -> None:
    # Adam divides by the root of a mean of squares, which magnifies rounding where gradients are near zero.
    _assert_exact(behaviours, "steps_per_execution", 1e-7)


def _check_eagerly(folder: Path) -> Any:
    return _both(
        lambda seed: models.make_model("cnn", seed=seed, run_eagerly=True),
        lambda model, _: model.fit(*CASES["cnn"].data(27), batch_size=12, shuffle=False, verbose=0),
        batch="total",
    )


def test_eager_steps_are_exact_too(behaviours: Any) -> None:
    _assert_exact(behaviours, "eagerly")


def _check_own_step_unbuilt(folder: Path) -> Any:
    import keras
    import tensorflow as tf

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(16, activation="relu")
            self.shared = keras.layers.Dense(16)
            self.unused = keras.layers.Dense(3)
            self.last = keras.layers.Dense(5)

        def call(self, x: Any) -> Any:
            self.unused(x)
            return self.last(self.shared(self.shared(self.hidden(x))))

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def build(seed: int) -> Any:
        models.begin(seed)
        model = Own()
        model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return _both(build, lambda model, _: models.train(model, "mlp"), batch="total", routes=None)


def test_a_train_step_of_ones_own_and_a_model_without_shapes(behaviours: Any) -> None:
    _assert_exact(behaviours, "own_step_unbuilt")


def _check_several(folder: Path) -> Any:
    return {"lists": own_models.lists(), "dictionaries": own_models.dictionaries(), "batches": own_models.batches()}


@pytest.mark.parametrize("name", ["lists", "dictionaries", "batches"])
def test_several_inputs_and_outputs(behaviours: Any, name: str) -> None:
    own_models.assert_equal([worker["several"] for worker in behaviours], name)


def _autoencoder_step(self: Any, data: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        error, divergence = self.losses_of(data)
        loss = error + divergence
    gradients = tape.gradient(loss, self.trainable_weights)
    self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
    for metric, value in zip(self.tracked, (loss, divergence), strict=True):
        metric.update_state(value)
    return {metric.name: metric.result() for metric in self.tracked}


def _adversaries_step(self: Any, data: Any) -> Any:
    import tensorflow as tf

    for name in own_models.TURNS:
        with tf.GradientTape() as tape:
            loss = self.loss_for(name, data)
        weights = getattr(self, name).trainable_weights
        self.optimizers[name].apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracked[name].update_state(loss)
    return {metric.name: metric.result() for metric in self.metrics}


def _check_autoencoder(folder: Path) -> Any:
    return own_models.autoencoder(_autoencoder_step)


def _check_adversaries(folder: Path) -> Any:
    return own_models.adversaries(_adversaries_step)


def test_an_autoencoder_without_call(behaviours: Any) -> None:
    own_models.assert_equal(behaviours, "autoencoder")


def test_two_optimizers_in_one_step_one_of_them_twice(behaviours: Any) -> None:
    own_models.assert_equal(behaviours, "adversaries")


def _check_frozen(folder: Path) -> Any:
    import keras

    def feed(model: Any, workers: int) -> None:
        models.train(model, "mlp")
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.1), model.loss)
        models.train(model, "mlp")

    return _both(_mlp, feed, batch="total")


def test_compiling_again_with_frozen_layers(behaviours: Any) -> None:
    _assert_exact(behaviours, "frozen")


def _check_local_statistics(folder: Path) -> Any:
    import keras

    import poseidon.keras

    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(3 + int(os.environ["RANK"]))
    layers = [keras.layers.Dense(32), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((40,)), *layers, keras.layers.Dense(5)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    distributed = poseidon.keras.distribute(model)
    history = model.fit(*CASES["mlp"].data(64), batch_size=8, epochs=3, verbose=0)
    noise = keras.ops.convert_to_numpy(layers[2](np.ones((1, 200)), training=True))
    distributed.close()
    return models.digest(model.get_weights()), noise.tobytes(), history.history["loss"], type(model.optimizer).__name__


def test_half_precision_with_local_statistics_and_noise_leaves_equal_replicas(behaviours: Any) -> None:
    mine, theirs = (worker["local_statistics"] for worker in behaviours)
    assert mine[0] == theirs[0]
    assert mine[1] != theirs[1], "dropout is the same on all workers"
    assert mine[2] == theirs[2]
    assert np.isfinite(mine[2]).all()
    assert mine[3] == "LossScaleOptimizer"


EXAMPLES = {"text": ["--epochs", "2", "--pieces", "4000"], **amount({}, {"resnet": ["--epochs", "1"]})}


def _check_examples(folder: Path) -> Any:
    import importlib
    import sys

    import keras

    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "keras"))
    found = {}
    for name, arguments in EXAMPLES.items():
        sys.argv = [name, *arguments]
        found[name] = importlib.import_module(name).main()
    return found


def test_examples_learn(behaviours: Any) -> None:
    assert behaviours[0]["examples"] == behaviours[1]["examples"]
    # Who always says the commonest is right in 3 of 10.
    assert behaviours[0]["examples"]["text"] > 0.5
    assert behaviours[0]["examples"].get("resnet", 1.0) > 0.4, "a tenth by chance"


def _check_files_and_logs(folder: Path) -> Any:
    import keras

    import poseidon.keras

    rank = int(os.environ["RANK"])
    model = _mlp(3 + rank)
    distributed = poseidon.keras.distribute(model)

    class Impatient(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and rank == 1:
                self.model.stop_training = True

    mine = folder / f"worker{rank}"
    mine.mkdir()
    callbacks = [
        keras.callbacks.ModelCheckpoint(mine / "best.keras", monitor="val_loss"),
        keras.callbacks.CSVLogger(mine / "log.csv"),
        keras.callbacks.EarlyStopping(patience=5),
        Impatient(),
    ]
    history = model.fit(
        *CASES["mlp"].data(60), batch_size=10, epochs=9, validation_split=0.2, callbacks=callbacks, verbose=0
    )
    model.save(mine / "last.keras")
    distributed.verify_replicas()
    distributed.close()
    model.save_weights(mine / "after.weights.h5")
    return sorted(path.name for path in mine.iterdir()), history.history


def test_worker_0_writes_and_all_log_the_same_and_stop_together(behaviours: Any) -> None:
    (files, logs), (others_files, others_logs) = (worker["files_and_logs"] for worker in behaviours)
    assert files == ["after.weights.h5", "best.keras", "last.keras", "log.csv"]
    assert others_files == ["after.weights.h5"]
    assert logs == others_logs
    assert len(logs["val_loss"]) == 2


def _check_backup(folder: Path) -> Any:
    import keras

    import poseidon.keras

    def run(epochs: int, seed: int) -> Any:
        model = _mlp(seed)
        distributed = poseidon.keras.distribute(model)
        backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
        history = model.fit(
            *CASES["mlp"].data(40), batch_size=10, epochs=epochs, shuffle=False, callbacks=[backup], verbose=0
        )
        distributed.close()
        return history.epoch, models.digest(model.get_weights())

    return run(2, 3), run(4, 11 + int(os.environ["RANK"])), run(4, 12)


def test_all_workers_go_on_from_worker_0s_backup(behaviours: Any) -> None:
    mine, theirs = (worker["backup"] for worker in behaviours)
    assert mine == theirs
    assert mine[1][0] == [2, 3]


def _check_errors(folder: Path) -> Any:
    import keras
    import tensorflow as tf

    import poseidon.keras
    from poseidon.errors import PoseidonError

    def message(build: Any, **options: Any) -> str:
        model = build()

        def train() -> None:
            poseidon.keras.distribute(model, **options)
            models.train(model, "mlp")

        with pytest.raises(PoseidonError) as caught:
            train()
        return str(caught.value)

    rank = int(os.environ["RANK"])

    def other_shape() -> Any:
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(5 + rank)])
        model.compile("sgd", "mse")
        return model

    def under_strategy() -> Any:
        with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
            return _mlp(3)

    def twice() -> Any:
        model = _mlp(3)
        poseidon.keras.distribute(model)
        return model

    class Manual(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            kernel, _ = self.trainable_variables
            kernel.assign_sub(tape.gradient(loss, kernel))
            return {"loss": loss}

    def by_hand() -> Any:
        model = Manual([keras.Input((40,)), keras.layers.Dense(5)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return {
        "shape": message(other_shape),
        "strategy": message(under_strategy),
        "by_hand": message(by_hand),
        "batch": message(lambda: _mlp(3), batch="each"),
        "routes": message(lambda: _mlp(3), routes={"nothing": "factors"}),
        "twice": message(twice),
    }


def test_errors_say_what_to_do(behaviours: Any) -> None:
    messages = behaviours[1]["errors"]
    assert "dense/kernel (trainable) has shape [40, 5] on rank 0 and [40, 6] on rank 1" in messages["shape"]
    assert "outside of strategy.scope()" in messages["strategy"]
    assert "did not call self.optimizer.apply" in messages["by_hand"]
    assert "per-worker, total" in messages["batch"]
    assert "is already distributed" in messages["twice"]
    assert "no unit matches 'nothing'" in messages["routes"]


def _check_unequal_ends(folder: Path) -> Any:
    import poseidon.keras
    from poseidon.errors import MismatchError

    model = _mlp(3)
    poseidon.keras.distribute(model, data="own")
    data = CASES["mlp"].data(8 if os.environ["RANK"] == "0" else 12)
    with pytest.raises(MismatchError) as caught:
        model.fit(*data, batch_size=4, verbose=0)
    return str(caught.value)


def test_a_worker_with_fewer_batches_is_named(behaviours: Any) -> None:
    for worker in behaviours:
        assert "worker 0 has ended its epoch while worker 1 has a batch left" in worker["unequal_ends"]


def _check_dealing(folder: Path) -> Any:
    from poseidon.keras.batches import BatchDeal, DealtArrays, unpack

    seen: dict[bool, list[list[tuple[int, list[float]]]]] = {}
    for divides in (True, False):
        seen[divides] = []
        for rank in range(3):
            dealt = DealtArrays((np.arange(13.0),), 6 if divides else 2, BatchDeal(rank, 3, divides), seed=1)
            batches = [unpack(dealt[index]) for index in range(dealt.num_batches)]
            seen[divides].append([(int(samples[0]), np.asarray(x).tolist()) for x, samples in batches])
    return seen


def test_every_sample_is_dealt_once(behaviours: Any) -> None:
    for divided in behaviours[0]["dealing"].values():
        assert [len(worker) for worker in divided] == [3, 3, 3]
        counted = [value for worker in divided for samples, values in worker for value in values[:samples]]
        assert sorted(counted) == list(range(13))
        assert counted != sorted(counted)
        # Thirteen samples leave one for the last step: the others run it too, uncounted.
        assert sorted(worker[-1][0] for worker in divided) == [0, 0, 1]
