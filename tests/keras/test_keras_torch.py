"""Keras on torch, several workers against one; each set of workers is started once for many checks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import checks
import models
import own_models
import pytest
from models import CASES

from ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed"),
    pytest.mark.timeout(900),
]

LOSS_TOLERANCE = 1e-6
"""Keras on torch computes these losses in float32, whatever the weights are."""

ENV = {"KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": ""}


def _two_workers(folder: str) -> dict[str, Any]:
    return {
        **checks.exactness(cluster=checks.slow_cluster()),
        "datasets_and_adam": checks.datasets_and_adam(),
        "own_step": checks.own_step(_train_step),
        "tied": checks.tied(),
        "lists": own_models.lists(),
        "dictionaries": own_models.dictionaries(),
        "autoencoder": own_models.autoencoder(_autoencoder_step),
        "adversaries": own_models.adversaries(_adversaries_step),
        "half_precision": checks.half_precision(),
        "files_and_layers": checks.files_and_layers(Path(folder)),
        "overlap": _overlap(),
        "compiled": _compiled(),
        "own_loop": _own_loop(),
        "padded": _padded(),
        "metrics": _summed_metrics(),
        "bfloat16": _whole_bfloat16(),
    }


def _four_workers() -> dict[str, Any]:
    return checks.exactness(names=models.ON_FOUR)


@pytest.fixture(scope="module")
def alone() -> Any:
    """Results of one worker with all samples."""
    return run_ranks(models.train_alone, 1, env=ENV, **checks.START)[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of two workers on slow links, so that short forms are taken."""
    return run_ranks(_two_workers, 2, str(tmp_path_factory.mktemp("keras")), env=ENV, **checks.START)


@pytest.fixture(scope="module")
def four() -> Any:
    """Results of four workers, where the plan decides."""
    return run_ranks(_four_workers, 4, env=ENV, **checks.START)


@pytest.mark.parametrize("name", list(CASES))
def test_two_equal_one_worker_with_all_samples(alone: Any, two: Any, name: str) -> None:
    models.assert_equal([worker[name] for worker in two], alone[name])


@pytest.mark.parametrize("name", models.ON_FOUR)
def test_four_equal_one_worker_with_all_samples(alone: Any, four: Any, name: str) -> None:
    models.assert_equal([worker[name] for worker in four], alone[name])


def test_dense_layers_send_factors_and_embeddings_rows_during_backward(two: Any) -> None:
    mlp, embedding = two[0]["mlp"], two[0]["embedding"]
    assert list(mlp.routes.values()).count("factors") == 2  # one kernel has a penalty, one is too small
    assert "rows" in embedding.routes.values()
    assert "Gradients travel during backward." in mlp.summary


def test_datasets_clipping_accumulation_and_adam(two: Any) -> None:
    # Adam divides by the root of a mean of squares, which magnifies rounding where gradients are near zero.
    checks.assert_exact(two, "datasets_and_adam", 1e-7)


def _train_step(self: Any, data: Any) -> Any:
    import torch

    x, y = data
    self.zero_grad()
    loss = self.compute_loss(x, y, self(x, training=True))
    loss.backward()
    variables = list(self.trainable_weights)
    with torch.no_grad():
        self.optimizer.apply([variable.value.grad for variable in variables], variables)
    return {"loss": loss}


def test_a_train_step_of_ones_own_with_shared_and_unused_layers(two: Any) -> None:
    checks.assert_exact(two, "own_step")
    assert list(two[0]["own_step"][2].values()).count("factors") == 2


def test_a_table_that_is_also_multiplied_with(two: Any) -> None:
    checks.assert_exact(two, "tied")


@pytest.mark.parametrize("name", ["lists", "dictionaries"])
def test_several_inputs_and_outputs(two: Any, name: str) -> None:
    own_models.assert_equal(two, name, LOSS_TOLERANCE)


def _autoencoder_step(self: Any, data: Any) -> Any:
    self.zero_grad()
    error, divergence = self.losses_of(data)
    loss = error + divergence
    _learn(loss, self.optimizer, self.trainable_weights)
    for metric, value in zip(self.tracked, (loss, divergence), strict=True):
        metric.update_state(value)
    return {metric.name: metric.result() for metric in self.tracked}


def _adversaries_step(self: Any, data: Any) -> Any:
    for name in own_models.TURNS:
        self.zero_grad()
        loss = self.loss_for(name, data)
        _learn(loss, self.optimizers[name], getattr(self, name).trainable_weights)
        self.tracked[name].update_state(loss)
    return {metric.name: metric.result() for metric in self.metrics}


def _learn(loss: Any, optimizer: Any, weights: Any) -> None:
    import torch

    loss.backward()
    with torch.no_grad():
        optimizer.apply([weight.value.grad for weight in weights], weights)


def test_an_autoencoder_without_call(two: Any) -> None:
    own_models.assert_equal(two, "autoencoder", LOSS_TOLERANCE)


def test_two_optimizers_in_one_step_one_of_them_twice(two: Any) -> None:
    own_models.assert_equal(two, "adversaries", LOSS_TOLERANCE)


def test_half_precision(two: Any) -> None:
    checks.assert_half_precision(two)


def test_worker_0_writes_and_the_model_is_given_back(two: Any) -> None:
    checks.assert_files_and_layers(two)


def _overlap() -> list[bool]:
    """Tell, step by step, whether a layer's factors were the last to leave when backward came to the layer below."""
    import keras
    import torch

    import poseidon.keras
    from poseidon.routes.factors import FactorsExchanger

    seen: list[bool] = []
    left = [""]
    start = FactorsExchanger.start

    def start_and_tell(self: Any, item: Any, brought: Any, step: int) -> Any:
        left.append(item.unit.name)
        return start(self, item, brought, step)

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:  # noqa: ARG004 - autograd's own signature
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ARG004 - autograd's own signature
            seen.append(left[-1] == layers[-1].name)
            return gradient

    class Between(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return Look.apply(x) if x.requires_grad else x

    layers = [keras.layers.Dense(8), Between(), keras.layers.Dense(5)]
    model = keras.Sequential([keras.Input((40,)), *layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    distributed = poseidon.keras.distribute(model, routes={"dense*": "factors"})
    FactorsExchanger.start = start_and_tell  # type: ignore[method-assign]
    model.fit(*CASES["mlp"].data(24), batch_size=4, verbose=0)
    FactorsExchanger.start = start  # type: ignore[method-assign]
    distributed.close()
    return seen


def test_factors_leave_while_backward_goes_on(two: Any) -> None:
    # The first backward goes by allreduce.
    assert all(worker["overlap"] == [False, True, True] for worker in two)


def _compiled() -> Any:
    """Ask for a compiled step; return whether it still is one, and the last loss."""
    import poseidon.keras

    model = models.make_model("mlp", jit_compile=True)
    distributed = poseidon.keras.distribute(model)
    history = model.fit(*CASES["mlp"].data(24), batch_size=6, verbose=0)
    distributed.close()
    return model.jit_compile, history.history["loss"][-1]


def test_a_compiled_step_is_turned_off(two: Any) -> None:
    assert [worker["compiled"][0] for worker in two] == [False, False]
    assert len({worker["compiled"][1] for worker in two}) == 1


def _model(policy: str | None = None) -> Any:
    import keras

    models.begin(3)
    if policy is not None:
        keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(5)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy", _Foreign()])
    return model


def _Foreign() -> Any:  # noqa: N802 - a class that can be made only where Keras is imported
    import keras

    class Foreign(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="foreign")
            self.calls = self.add_weight(shape=(), initializer="zeros")

        def update_state(self, *_: Any, **__: Any) -> None:
            self.calls.assign_add(1.0)

        def result(self) -> Any:
            return self.calls

    return Foreign()


def _own_loop() -> str:
    import torch

    import poseidon.keras
    from poseidon.errors import UnsupportedError

    model = _model()
    distributed = poseidon.keras.distribute(model)
    x, y = CASES["mlp"].data(8)
    model.zero_grad()
    model.compute_loss(x, y, model(x, training=True)).backward()
    gradients = [variable.value.grad for variable in model.trainable_variables]
    with torch.no_grad(), pytest.raises(UnsupportedError) as caught:
        model.optimizer.apply(gradients, model.trainable_variables)
    distributed.close()
    with torch.no_grad():
        model.optimizer.apply(gradients, model.trainable_variables)
    return str(caught.value)


def test_a_loop_of_ones_own_on_a_distributed_model_is_refused(two: Any) -> None:
    assert all("its optimizer was called outside of fit() and train_on_batch()" in one["own_loop"] for one in two)


def _padded() -> list[tuple[int, tuple[int, ...]]]:
    import numpy as np

    from poseidon.keras.batches import BatchDeal, unpack

    group = [(np.zeros((4, 3)), np.zeros(4)), (np.zeros((4, 5)), np.zeros(4))]
    found = []
    for rank in range(3):
        (x, _), samples = unpack(BatchDeal(rank, 3, divides=False).of_group(group))
        found.append((int(samples[0]), x.shape))
    return found


def test_batches_of_different_widths_stay_whole(two: Any) -> None:
    assert two[0]["padded"] == [(4, (4, 3)), (4, (4, 5)), (0, (1, 3))]


def _summed_metrics() -> dict[str, float]:
    import poseidon.keras

    model = _model()
    distributed = poseidon.keras.distribute(model)
    x, y = CASES["mlp"].data(16)
    history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    counts = {variable.path: float(variable.value) for variable in model.metrics[1].variables}
    distributed.close()
    return {"foreign": history["foreign"][0], "counted": max(counts.values())}


def test_keras_own_metrics_are_summed_beside_a_foreign_one(two: Any) -> None:
    for worker in two:
        assert worker["metrics"] == {"foreign": 2.0, "counted": 16.0}, "two batches of each worker, 16 samples of all"


def _whole_bfloat16() -> str:
    import poseidon.keras

    model = _model("bfloat16")
    distributed = poseidon.keras.distribute(model)
    model.fit(*CASES["mlp"].data(8), batch_size=4, verbose=0)
    distributed.close()
    return str(model.layers[0].kernel.dtype)


def test_a_model_in_bfloat16_alone(two: Any) -> None:
    assert two[0]["bfloat16"] == "bfloat16"
