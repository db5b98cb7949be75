"""Keras on JAX, several workers against one; each set of workers is started once for many checks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import checks
import models
import own_models
import pytest
from models import CASES

from nightly import only
from ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed"),
    pytest.mark.timeout(900),
]

LOSS_TOLERANCE = 1e-6
"""Keras on JAX computes these losses in float32, whatever the weights are."""

# Compiles twice as fast as by default and gives the same bits; at level 0 exp and erf get worse than the tolerance.
ENV = {
    "KERAS_BACKEND": "jax",
    "JAX_ENABLE_X64": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def _two_workers(folder: str) -> dict[str, Any]:
    return {
        **checks.exactness(names=models.ON_JAX, cluster=checks.slow_cluster()),
        "datasets_and_adam": checks.datasets_and_adam(),
        "own_step": checks.own_step(_train_step),
        "halving_step": checks.own_step(_halving_step),
        "tied": checks.tied(),
        "lists": own_models.lists(),
        "autoencoder": own_models.autoencoder(_autoencoder_step),
        "half_precision": checks.half_precision(),
        "files_and_layers": checks.files_and_layers(Path(folder)),
        "eagerly": _eagerly(),
        "tied_late": _tied_late(),
        "by_hand": _by_hand(),
    }


def _four_workers() -> dict[str, Any]:
    return checks.exactness()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How ranks are started; what one of them compiles, the later ones need not, except steps with callbacks."""
    return {**checks.START, "env": {**ENV, "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled"))}}


@pytest.fixture(scope="module")
def alone(start: dict[str, Any]) -> Any:
    """Results of one worker with all samples."""
    return run_ranks(models.train_alone, 1, models.ON_JAX, **start)[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, alone: Any, start: dict[str, Any]) -> Any:
    """Results of two workers on slow links, so that short forms are taken."""
    return run_ranks(_two_workers, 2, str(tmp_path_factory.mktemp("keras")), **start)


@pytest.fixture(scope="module")
def four(alone: Any, start: dict[str, Any]) -> Any:
    """Results of four workers, where the plan decides."""
    return run_ranks(_four_workers, 4, **start)


@pytest.mark.parametrize("name", models.ON_JAX)
def test_two_equal_one_worker_with_all_samples(alone: Any, two: Any, name: str) -> None:
    models.assert_equal([worker[name] for worker in two], alone[name])


@only  # each of them compiles; the suite has four workers on torch and TensorFlow
@pytest.mark.parametrize("name", CASES)
def test_four_equal_one_worker_with_all_samples(alone: Any, four: Any, name: str) -> None:
    models.assert_equal([worker[name] for worker in four], alone[name])


def test_dense_layers_send_factors_and_embeddings_rows_after_backward(two: Any) -> None:
    mlp, embedding = two[0]["mlp"], two[0]["embedding"]
    assert list(mlp.routes.values()).count("factors") == 2  # one kernel has a penalty, one is too small
    assert "rows" in embedding.routes.values()
    assert "a jitted step leaves no room for overlap" in mlp.summary


def test_datasets_clipping_accumulation_and_adam(two: Any) -> None:
    # Adam divides by the root of a mean of squares, which magnifies rounding where gradients are near zero.
    checks.assert_exact(two, "datasets_and_adam", 1e-7)


def _train_step(self: Any, state: Any, data: Any) -> Any:
    import jax

    trainable, others, optimizer, metrics = state
    x, y = data

    def find_loss(trainable: Any) -> Any:
        outputs, after = self.stateless_call(trainable, others, x)
        return self.compute_loss(x, y, outputs), after

    (loss, others), gradients = jax.value_and_grad(find_loss, has_aux=True)(trainable)
    trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
    return {"loss": loss}, (trainable, others, optimizer, metrics)


def _halving_step(self: Any, state: Any, data: Any) -> Any:
    import jax

    trainable, others, optimizer, metrics = state
    x, y = data

    def find_loss(trainable: Any) -> Any:
        outputs, after = self.stateless_call(trainable, others, x)
        return self.compute_loss(x, y, outputs), after

    (loss, others), gradients = jax.value_and_grad(find_loss, has_aux=True)(trainable)
    halves = [gradient / 2 for gradient in gradients]
    trainable, optimizer = self.optimizer.stateless_apply(optimizer, halves, trainable)
    return {"loss": loss}, (trainable, others, optimizer, metrics)


@pytest.mark.parametrize("name", ["own_step", "halving_step"])
def test_a_train_step_of_ones_own_with_shared_and_unused_layers(two: Any, name: str) -> None:
    checks.assert_exact(two, name)
    # What it does to its gradients, factors would not show.
    assert "factors" not in two[0][name][2].values()


def test_a_table_that_is_also_multiplied_with(two: Any) -> None:
    checks.assert_exact(two, "tied")
    # What is used elsewhere too shows in the first step, and the plan does without its short form.
    assert "rows" not in two[0]["tied"][2].values()


def test_several_inputs_and_outputs(two: Any) -> None:
    own_models.assert_equal(two, "lists", LOSS_TOLERANCE)


def _autoencoder_step(self: Any, state: Any, data: Any) -> Any:
    import jax
    import keras

    trainable, others, optimizer, metrics = state

    def find_loss(trainable: Any) -> Any:
        with keras.StatelessScope(list(zip(self.trainable_variables, trainable, strict=True))):
            error, divergence = self.losses_of(data)
        return error + divergence, divergence

    (loss, divergence), gradients = jax.value_and_grad(find_loss, has_aux=True)(trainable)
    trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
    after, logs = [], {}
    for metric, value in zip(self.tracked, (loss, divergence), strict=True):
        mine = metric.stateless_update_state(metrics[len(after) : len(after) + len(metric.variables)], value)
        logs[metric.name] = metric.stateless_result(mine)
        after += mine
    return logs, (trainable, others, optimizer, after)


def test_an_autoencoder_without_call(two: Any) -> None:
    own_models.assert_equal(two, "autoencoder", LOSS_TOLERANCE)


def test_half_precision(two: Any) -> None:
    checks.assert_half_precision(two)


def test_worker_0_writes_and_the_model_is_given_back(two: Any) -> None:
    checks.assert_files_and_layers(two)


def _eagerly() -> Any:
    import keras

    def build(seed: int) -> Any:
        models.begin(seed)
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
        return model

    return checks.both(
        build,
        lambda model, _: model.fit(*CASES["mlp"].data(27), batch_size=12, shuffle=False, verbose=0),
        batch="total",
    )


def test_eager_steps_are_exact_too(two: Any) -> None:
    checks.assert_exact(two, "eagerly")


def _message(model: Any, train: Any, **options: Any) -> str:
    import poseidon.keras
    from poseidon.errors import UnsupportedError

    distributed = poseidon.keras.distribute(model, **options)
    with pytest.raises(UnsupportedError) as caught:
        train()
    distributed.close()
    return str(caught.value)


def _tied_late() -> str:
    """Open the gate between two epochs: then the table has a gradient that rows do not tell."""
    import keras

    model = checks.make_tied(3, gate=0.0)
    opening = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.layers[-1].gate.assign(1.0))

    def train() -> None:
        model.fit(*checks.tied_data(), batch_size=8, epochs=2, callbacks=[opening], verbose=0)

    return _message(model, train, cluster=checks.slow_cluster())


def test_a_weight_used_elsewhere_later_on_is_an_error(two: Any) -> None:
    for worker in two:
        assert "has a gradient from outside of its layer" in worker["tied_late"]
        assert '"allreduce"})' in worker["tied_late"]


def _by_hand() -> str:
    import keras

    class Manual(keras.Sequential):  # type: ignore[misc]
        def train_step(self, state: Any, data: Any) -> Any:
            return {}, state

    model = Manual([keras.Input((40,)), keras.layers.Dense(5)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return _message(model, lambda: models.train(model, "mlp"))


def test_a_step_past_the_optimizer_is_an_error(two: Any) -> None:
    assert "did not call self.optimizer.stateless_apply" in two[1]["by_hand"]
