"""Replayed passes without a GPU: the layers themselves are recorded, and a replay lets them compute anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from poseidon import caffe
from poseidon.caffe.net import BuiltNet
from poseidon.caffe.replay import COMPUTED_FIRST, ReplayedPasses
from poseidon.caffe.solver import get_solver
from poseidon.errors import ConfigError

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 2 dim: 5 dim: 5 } } }
layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 4 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param {
  num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip" inner_product_param {
  num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "ip2" type: "InnerProduct" bottom: "conv" top: "ip2" inner_product_param {
  num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
layer { name: "seen" type: "ReLU" bottom: "ip" top: "seen" }
layer { name: "aux" type: "EuclideanLoss" bottom: "ip" bottom: "ip2" top: "aux" loss_weight: 0.1 }
"""


class Recorder:
    """Does what a CUDA graph does: a replay computes into the tensors of the recorded pass."""

    def __init__(self) -> None:
        self.net: BuiltNet
        self.replays = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        memories = list({id(memory): memory for memory in self.net.memories()}.values())
        before = [None if memory.is_zero else memory.tensor() for memory in memories]
        values = [None if tensor is None else tensor.clone() for tensor in before]
        loss = work()
        places = [(memory, memory.tensor()) for memory in memories if not memory.is_zero]

        def replay() -> None:
            self.replays += 1
            now = [None if memory.is_zero else memory.tensor() for memory in memories]
            for memory in memories:
                memory.clear()
            for memory, tensor in places:  # where a graph reads, whatever the blobs hold by now
                memory.put(tensor)
            self.net.clear_param_diffs()
            found = work()
            for memory, tensor in places:
                if memory.tensor() is not tensor:
                    tensor.copy_(memory.tensor())
            loss.copy_(found)
            for memory, held in zip(memories, now, strict=True):  # a graph knows nothing of blobs
                memory.clear() if held is None else memory.put(held)

        # Recording computes nothing: results are void, but for those that are a source's own memory, and what passes
        # change in place has not changed.
        for _, tensor in places:
            tensor.fill_(torch.nan)
        for old, value in zip(before, values, strict=True):
            if old is not None and value is not None:
                old.copy_(value)
        return replay, loss


def make(tmp_path, net: str = NET, extra: str = ""):
    (tmp_path / "net.prototxt").write_text(net)
    (tmp_path / "solver.prototxt").write_text(
        f'net: "{tmp_path}/net.prototxt" base_lr: 0.1 momentum: 0.9 lr_policy: "step" stepsize: 4 gamma: 0.5 '
        f'weight_decay: 0.01 random_seed: 3 snapshot_prefix: "{tmp_path}/s" {extra}'
    )
    return get_solver(str(tmp_path / "solver.prototxt"))


def feed(solver, step: int) -> None:
    chance = np.random.default_rng(step)
    # In new memory, as by a data layer, and as by a script that writes to a blob of a GPU.
    solver.net.blobs["data"].put_data(torch.tensor(chance.standard_normal((4, 2, 5, 5)), dtype=torch.float32))
    solver.net.blobs["label"].put_data(torch.tensor(chance.integers(0, 3, 4), dtype=torch.float32))


def with_replay(solver) -> Recorder:
    recorder = Recorder()
    recorder.net = solver.net
    solver._replayed = ReplayedPasses(solver.net, recorder)
    return recorder


def state(solver) -> list[np.ndarray]:
    blobs = [blob for layer in solver.net.layers for blob in layer.blobs]
    return [np.array(blob.data) for blob in blobs] + [np.array(blob.diff) for blob in solver.net.blobs.values()]


def train(solver, meddle: Callable[[int], None] = lambda _: None, steps: int = 12) -> list[float]:
    losses = []
    for step in range(steps):
        feed(solver, step)
        meddle(step)
        solver.step(1)
        losses.append(solver.smoothed_loss)
    return losses


def leave_alone(solver, step: int) -> None:
    pass


def both(tmp_path, meddle: Callable[[Any, int], None] = leave_alone, extra: str = "") -> Recorder:
    """Train layer by layer and replayed; everything must come out alike."""
    plain, replayed = make(tmp_path, extra=extra), make(tmp_path, extra=extra)
    recorder = with_replay(replayed)
    expected = train(plain, lambda step: meddle(plain, step))
    assert train(replayed, lambda step: meddle(replayed, step)) == expected
    for one, two in zip(state(plain), state(replayed), strict=True):
        np.testing.assert_array_equal(one, two)
    return recorder


def test_replayed_passes_train_as_those_layer_by_layer(tmp_path) -> None:
    recorder = both(tmp_path)
    assert recorder.replays == 12 - COMPUTED_FIRST


def change_parameters(solver, step: int) -> None:
    if step in (6, 9):
        weight = solver.net.params["ip"][0]
        weight.put_data(weight.data_tensor * 0.5)


def change_loss_weight(solver, step: int) -> None:
    if step == 7:
        solver.net.blobs["aux"].put_diff(torch.tensor(3.0))


def give_a_gradient(solver, step: int) -> None:
    if step >= 7:
        solver.net.blobs["ip_ip_0_split_1"].diff[...] = 0.5


def look_at_everything(solver, step: int) -> None:
    for blob in solver.net.blobs.values():
        assert np.isfinite(blob.data).all(), step
        assert np.isfinite(blob.diff).all(), step


def save_and_restore(solver, step: int) -> None:
    if step == 6:
        solver.snapshot()
    if step == 9:
        solver.restore(f"{solver.param.snapshot_prefix}_iter_6.solverstate")


def share_parameters(solver, step: int) -> None:
    if step == 7:
        owner = make_twin(solver)
        solver.net.share_with(owner.net)


def make_twin(solver):
    twin = get_solver(solver.param)
    twin.net.params["conv"][0].data[...] = 0.25
    return twin


@pytest.mark.parametrize(
    "meddle",
    [
        change_parameters,
        change_loss_weight,
        give_a_gradient,
        look_at_everything,
        save_and_restore,
        share_parameters,
    ],
)
def test_what_a_script_does_between_iterations_counts(tmp_path, meddle) -> None:
    assert both(tmp_path, meddle).replays > 3


NEW = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 3 } } }
layer { name: "a" type: "InnerProduct" bottom: "data" top: "a" inner_product_param {
  num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "a" bottom: "data" top: "loss" }
"""


def test_a_pass_that_a_script_computes_itself_leaves_nothing_behind(tmp_path) -> None:
    """The input is split, and was the same when the pass was recorded as in the one before."""

    def train_and_look(solver) -> list[np.ndarray]:
        for seed in (1, 2, 3):
            chance = np.random.default_rng(seed)
            solver.net.blobs["data"].put_data(torch.tensor(chance.standard_normal((4, 3)), dtype=torch.float32))
            solver.step(COMPUTED_FIRST + 2)
            solver.net.blobs["data"].put_data(torch.tensor(chance.standard_normal((4, 3)), dtype=torch.float32))
            solver.net.forward()
        solver.net.blobs["data"].put_data(torch.ones(4, 3))
        solver.step(1)
        return [np.array(one) for blob in solver.net.params["a"] for one in (blob.data, blob.diff)]

    plain, replayed = make(tmp_path, NEW), make(tmp_path, NEW)
    recorder = with_replay(replayed)
    for one, two in zip(train_and_look(plain), train_and_look(replayed), strict=True):
        np.testing.assert_array_equal(one, two)
    assert recorder.replays > 6


def test_a_backward_by_hand_is_that_of_the_replayed_pass(tmp_path) -> None:
    solver = make(tmp_path)
    with_replay(solver)
    train(solver, steps=COMPUTED_FIRST + 1)
    conv = next(layer for layer in solver.net.layers if layer.name == "conv")
    recorded = conv._graph
    solver.net.forward()
    assert conv._graph is not recorded
    train(solver, steps=1)
    assert conv._graph is recorded, "what backward needs is where the graph writes it"


def test_other_shapes_are_computed(tmp_path) -> None:
    solver = make(tmp_path)
    recorder = with_replay(solver)
    train(solver, steps=8)
    replays = recorder.replays
    assert replays > 0
    solver.net.blobs["data"].reshape(2, 2, 5, 5)
    solver.net.blobs["label"].reshape(2)
    solver.step(2)
    assert recorder.replays == replays
    assert solver.net.blobs["ip"].data.shape == (2, 3)
    solver.net.blobs["data"].reshape(4, 2, 5, 5)
    solver.net.blobs["label"].reshape(4)
    train(solver, steps=COMPUTED_FIRST + 2)
    assert recorder.replays > replays, "recorded anew"
    solver.net.blobs["data"].reshape(2, 2, 10, 5)  # as many values
    with pytest.raises(ConfigError, match="the weights have shape"):
        solver.step(1)


def test_a_graph_fits_only_what_was_recorded(tmp_path) -> None:
    solver = make(tmp_path)
    with_replay(solver)
    train(solver, steps=COMPUTED_FIRST + 1)
    solver.net.clear_param_diffs()
    graph = solver._replayed._graph
    assert graph is not None
    assert graph.fits()
    solver.net.blobs["data"].reshape(2, 2, 10, 5)  # as many values
    assert not graph.fits()
    solver.net.blobs["data"].reshape(4, 2, 5, 5)
    assert graph.fits()
    solver.net.share_with(make_twin(solver).net)
    assert not graph.fits()


def test_gradients_of_several_passes_add_up(tmp_path) -> None:
    assert both(tmp_path, extra="iter_size: 3").replays > 3


def test_callbacks_see_every_layer(tmp_path) -> None:
    solver = make(tmp_path)
    recorder = with_replay(solver)
    train(solver, steps=8)
    replays, seen = recorder.replays, []
    solver.net.before_forward_callbacks.append(seen.append)
    solver.step(1)
    assert seen == list(range(len(solver.net.layers)))
    assert recorder.replays == replays


def test_a_net_that_cannot_be_recorded_is_computed(tmp_path) -> None:
    plain, solver = make(tmp_path), make(tmp_path)
    recorder = with_replay(solver)

    def refuse(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        recorder(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    solver._replayed._record = refuse
    assert train(solver) == train(plain)
    assert recorder.replays == 0


ACCURACY = 'layer { name: "hits" type: "Accuracy" bottom: "ip" bottom: "label" top: "hits" }'


@pytest.mark.parametrize("extra", [ACCURACY, "force_backward: true"], ids=["waits for values", "source with backward"])
def test_other_layers_are_not_recorded(tmp_path, extra: str) -> None:
    solver = make(tmp_path, NET + extra)
    recorder = with_replay(solver)
    train(solver)
    assert recorder.replays == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_replays_what_it_computes_layer_by_layer(tmp_path, monkeypatch) -> None:
    caffe.set_mode_gpu()
    try:
        found = []
        for wanted in ("0", "1"):
            monkeypatch.setenv("POSEIDON_CAFFE_REPLAY", wanted)
            solver = make(tmp_path, extra="solver_mode: GPU")
            losses = train(solver, lambda step, solver=solver: change_parameters(solver, step))
            assert (solver._replayed._graph is not None) == (wanted == "1")
            found.append((losses, state(solver)))
        np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
        for one, two in zip(found[0][1], found[1][1], strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)
    finally:
        caffe.set_mode_cpu()
