"""Solvers on one worker: rules, nets, tests, displays, snapshots."""

from __future__ import annotations

import logging
import os
import re
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from caffe_golden import GOLDENS
from shared_rows import NET, shared_rows, values, write_solver  # noqa: F401 - a fixture

import poseidon.caffe as caffe
from poseidon.caffe.io.database import new_database
from poseidon.caffe.io.datum import image_datum
from poseidon.caffe.schema import NetParameter, SolverParameter, SolverState
from poseidon.caffe.schema.files import parse_text, read_binary
from poseidon.caffe.solver import state, updater
from poseidon.caffe.solver.signals import SignalActions
from poseidon.caffe.solver.workers import Action
from poseidon.errors import ConfigError

SNAPSHOTS = GOLDENS / "solvers" / "snapshot_sgd"
TYPES = {
    "SGD": "",
    "Nesterov": "",
    "AdaGrad": "momentum: 0",
    "RMSProp": "momentum: 0 rms_decay: 0.9",
    "AdaDelta": "delta: 1e-6 base_lr: 1",
    "Adam": "",
}


def solver_text(folder, text, batch=4):
    path = write_solver(folder, batch, "")
    path.write_text(merge(path.read_text(), text))
    return path


def merge(base, more):
    param = parse_text(base, SolverParameter)
    param.MergeFrom(parse_text(more, SolverParameter))
    return str(param)


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def spoken(caplog):
    caplog.set_level(logging.INFO, "poseidon.caffe")
    return caplog


def test_get_solver_makes_the_type_that_the_prototxt_names(tmp_path):
    for name, text in TYPES.items():
        solver = caffe.get_solver(solver_text(tmp_path, f'type: "{name}" {text}'))
        assert type(solver) is getattr(caffe, f"{name}Solver")
    with pytest.raises(ConfigError, match=r"unknown solver type 'Sgd'; known: AdaDelta, AdaGrad, Adam"):
        caffe.get_solver(solver_text(tmp_path, 'type: "Sgd"'))


@pytest.mark.parametrize("name", ["AdaGrad", "RMSProp"])
def test_rules_without_momentum_refuse_it(tmp_path, name):
    with pytest.raises(ConfigError, match=f"momentum is 0.9, but {name} uses none"):
        caffe.get_solver(solver_text(tmp_path, f'type: "{name}"'))


@pytest.mark.parametrize(("name", "text"), TYPES.items(), ids=list(TYPES))
@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
def test_resuming_gives_the_same_bits(tmp_path, name, text, form):
    path = solver_text(tmp_path, f'type: "{name}" {text} snapshot_format: {form} clip_gradients: 1')
    solver = caffe.get_solver(path)
    solver.step(3)
    solver.snapshot()
    solver.step(3)
    again = caffe.get_solver(path)
    again.restore(next(tmp_path.glob("*.solverstate*")))
    again.net.layers[0]._next = 3 * again.net.layers[0]._stride
    again.step(3)
    assert again.iter == 6
    for layer, blobs in values(solver.net).items():
        for blob, other in zip(blobs, values(again.net)[layer], strict=True):
            assert blob.tobytes() == other.tobytes()


def test_state_files_are_what_caffe_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(SNAPSHOTS)
    param = caffe.proto.caffe_pb2.SolverParameter()
    param.CopyFrom(parse_text(Path("solver.prototxt").read_text(), SolverParameter))
    solver = caffe.SGDSolver(param)
    solver.restore("snap_iter_5.solverstate")
    monkeypatch.chdir(tmp_path)
    solver.snapshot()
    solver.param.snapshot_format = solver.param.HDF5
    solver.snapshot()
    for name, message in (("snap_iter_5.solverstate", SolverState), ("snap_iter_5.caffemodel", NetParameter)):
        assert read_binary(name, message) == read_binary(SNAPSHOTS / name, message)
    with h5py.File("snap_iter_5.solverstate.h5") as ours, h5py.File(SNAPSHOTS / "snap_iter_5.solverstate.h5") as theirs:
        assert list(ours) == list(theirs)
        for name in ("iter", "current_step", "learned_net"):
            kind, expected = ours[name].id.get_type(), theirs[name].id.get_type()
            assert kind.get_class() == expected.get_class()
            assert ours[name].shape == theirs[name].shape
        assert ours["learned_net"].id.get_type().get_strpad() == h5py.h5t.STR_NULLTERM
        assert ours["learned_net"].id.get_type().get_size() == len("snap_iter_5.caffemodel.h5") + 1
        assert ours["learned_net"][()].rstrip(b"\0") == b"snap_iter_5.caffemodel.h5"
        for number in theirs["history"]:
            np.testing.assert_array_equal(ours["history"][number], theirs["history"][number])


def test_a_crash_while_writing_leaves_the_previous_snapshot(tmp_path, monkeypatch):
    solver = caffe.get_solver(solver_text(tmp_path, ""))
    solver.step(1)
    solver.snapshot()
    model, kept = tmp_path / "snap_iter_1.caffemodel", tmp_path / "snap_iter_1.solverstate"
    before = (model.read_bytes(), kept.read_bytes())
    solver.net.params["conv"][0].data[...] = 7
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match=r"snap_iter_1\.caffemodel: No space left"):
        solver.snapshot()
    assert (model.read_bytes(), kept.read_bytes()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "net.prototxt",
        "snap_iter_1.caffemodel",
        "snap_iter_1.solverstate",
        "solver.prototxt",
    ]


def test_a_full_disk_ends_no_training_but_its_last_snapshot_is_an_error(tmp_path, monkeypatch, caplog):
    solver = caffe.get_solver(solver_text(tmp_path, "snapshot: 2 max_iter: 4"))
    fsync = os.fsync

    def fill(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    solver.step(3)
    assert solver.iter == 3
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.fullmatch(r"Iteration 2: .*: No space left on device; .*; training goes on without this snapshot", said)
    with pytest.raises(ConfigError, match="No space left"):
        solver.step(1)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    solver.param.max_iter = 8
    with pytest.raises(ConfigError, match="Input/output error"):
        solver.step(2)
    monkeypatch.setattr(os, "fsync", fsync)
    solver.step(2)
    assert (tmp_path / "snap_iter_8.caffemodel").exists()


def test_states_that_do_not_fit_are_refused(tmp_path):
    adam = caffe.get_solver(solver_text(tmp_path, 'type: "Adam"'))
    adam.snapshot()
    sgd = caffe.get_solver(solver_text(tmp_path, ""))
    stored = tmp_path / "snap_iter_0.solverstate"
    with pytest.raises(ConfigError, match="holds 18 history blobs, this solver has 9"):
        sgd.restore(stored)
    stored.write_bytes(stored.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="truncated"):
        sgd.restore(stored)
    with pytest.raises(ConfigError, match="cannot read solver state"):
        sgd.restore(tmp_path / "nothing.solverstate.h5")


def test_a_state_is_found_with_its_parameters_after_moving(tmp_path, monkeypatch):
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    solver = caffe.get_solver(solver_text(source, ""))
    solver.step(2)
    solver.snapshot()
    path = solver_text(tmp_path, "")
    source.rename(target)
    again = caffe.get_solver(path)
    again.restore(target / "snap_iter_2.solverstate")
    np.testing.assert_array_equal(again.net.params["ip1"][0].data, solver.net.params["ip1"][0].data)


def test_snapshots_come_when_due_and_once_more_at_the_end(tmp_path):
    solver = caffe.get_solver(solver_text(tmp_path, "snapshot: 2 max_iter: 5 snapshot_after_train: true"))
    solver.solve()
    found = sorted(path.name for path in tmp_path.glob("*.solverstate"))
    assert found == ["snap_iter_2.solverstate", "snap_iter_4.solverstate", "snap_iter_5.solverstate"]


def test_snapshots_into_a_missing_folder_are_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"folder '.*nowhere' exists and is writable"):
        caffe.get_solver(solver_text(tmp_path, f'snapshot: 5 snapshot_prefix: "{tmp_path}/nowhere/x"'))


def test_snapshot_diff_is_written(tmp_path):
    solver = caffe.get_solver(solver_text(tmp_path, "snapshot_diff: true"))
    solver.step(1)
    solver.snapshot()
    stored = read_binary(tmp_path / "snap_iter_1.caffemodel", NetParameter)
    conv = next(layer for layer in stored.layer if layer.name == "conv")
    np.testing.assert_allclose(conv.blobs[0].diff, solver.net.params["conv"][0].diff.ravel())


TEST_NET = NET % 3


def test_several_test_nets_run_in_caffes_order(tmp_path, spoken):
    (tmp_path / "other.prototxt").write_text(TEST_NET.replace('name: "shared"', 'name: "other"'))
    text = (
        f'test_net: "{tmp_path}/other.prototxt" test_iter: 1 test_iter: 2 test_interval: 10 '
        'test_state { stage: "a" } test_state { stage: "b" level: 2 } test_compute_loss: true'
    )
    solver = caffe.get_solver(solver_text(tmp_path, text))
    assert [net.name for net in solver.test_nets] == ["other", "shared"]
    assert [net.param.state.stage[0] for net in solver.test_nets] == ["a", "b"]
    assert f"Creating test net (#0) specified by test_net file: {tmp_path}/other.prototxt" in lines(spoken)
    solver.step(1)
    said = lines(spoken)
    assert said.index("Iteration 0, Testing net (#0)") < said.index("Iteration 0, Testing net (#1)")
    assert sum(line.startswith("Test loss: ") for line in said) == 2
    assert solver.test_nets[1].layers[0]._next == 2 * 4


def test_tests_use_the_parameters_being_trained(tmp_path):
    solver = caffe.get_solver(solver_text(tmp_path, "test_iter: 1 test_interval: 1"))
    solver.step(2)
    solver.test_all()
    for name, blobs in solver.net.params.items():
        np.testing.assert_array_equal(solver.test_nets[0].params[name][0].data, blobs[0].data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('train_net: "x"', "names net and train_net; give exactly one"),
        ("test_iter: 1", "test_interval is 0; with test nets it must be positive"),
        ('test_net: "net.prototxt" test_interval: 1', "test_iter is given 0 times for 1 test nets"),
        ("test_iter: 1 test_interval: 1 test_state {} test_state {}", "test_state is given 2 times for 1 test nets"),
        ("iter_size: 0", "iter_size is 0; it must be at least 1"),
        ("average_loss: 0", "average_loss is 0; it must be at least 1"),
        ('regularization_type: "L3"', "unknown regularization_type 'L3'; known: L1, L2"),
    ],
)
def test_contradictions_are_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        caffe.get_solver(solver_text(tmp_path, text))


def test_a_solver_without_net_is_refused():
    with pytest.raises(ConfigError, match="names no training net"):
        caffe.SGDSolver(parse_text('base_lr: 1 lr_policy: "fixed"', SolverParameter))


def test_nets_given_inside_the_solver(tmp_path):
    param = parse_text('base_lr: 1 lr_policy: "fixed" test_iter: 1 test_interval: 1', SolverParameter)
    param.net_param.CopyFrom(parse_text(TEST_NET, NetParameter))
    solver = caffe.SGDSolver(param)
    assert (solver.net.phase, solver.test_nets[0].phase) == (caffe.TRAIN, caffe.TEST)


def test_errors_in_a_net_name_its_file(tmp_path):
    path = solver_text(tmp_path, "")
    net = tmp_path / "net.prototxt"
    net.write_text(net.read_text().replace('"Eltwise"', '"Eltwize"'))
    with pytest.raises(ConfigError, match=r"net\.prototxt: layer 'sum' has unknown type 'Eltwize'; did you mean"):
        caffe.get_solver(path)


def test_displays_average_the_last_losses(tmp_path, spoken):
    solver = caffe.get_solver(solver_text(tmp_path, "display: 1 average_loss: 3"))
    losses = []
    last = len(solver.net.layers) - 1
    solver.net.after_forward(lambda i: losses.append(float(solver.net.blobs["loss"].data)) if i == last else None)
    solver.step(5)
    shown = [float(line.rpartition(" ")[2]) for line in lines(spoken) if "iter/s" in line]
    assert shown == pytest.approx([np.mean(losses[max(0, i - 2) : i + 1]) for i in range(5)], rel=1e-5)


def test_callbacks_surround_the_gradients(tmp_path):
    solver = caffe.get_solver(solver_text(tmp_path, "iter_size: 2"))
    seen = []
    blob = solver.net.params["ip1"][0]
    solver.add_callback(
        lambda: seen.append(("start", blob.diff.any())), lambda: seen.append(("ready", blob.diff.any()))
    )
    solver.step(2)
    assert seen == [("start", False), ("ready", True)] * 2


def test_several_weight_files_are_loaded_in_order(tmp_path):
    solver = caffe.get_solver(solver_text(tmp_path, ""))
    for name, value in (("a", 1), ("b", 2)):
        solver.net.params["conv"][0].data[...] = value
        solver.net.save(tmp_path / f"{name}.caffemodel")
    again = caffe.get_solver(solver_text(tmp_path, f'weights: "{tmp_path}/a.caffemodel, {tmp_path}/b.caffemodel"'))
    assert (again.net.params["conv"][0].data == 2).all()


def test_share_weights(tmp_path):
    solver, other = (caffe.get_solver(solver_text(tmp_path, "")) for _ in range(2))
    start = solver.net.params["conv"][0].data.copy()
    solver.share_weights(other.net)
    np.testing.assert_array_equal(other.net.params["conv"][0].data, start)
    solver.step(1)
    assert (solver.net.params["conv"][0].data != start).any()
    np.testing.assert_array_equal(other.net.params["conv"][0].data, solver.net.params["conv"][0].data)


def test_debug_info_shows_only_in_displayed_iterations(tmp_path, spoken):
    solver = caffe.get_solver(solver_text(tmp_path, "display: 2 debug_info: true"))
    solver.step(2)
    assert sum("[Backward] All net params" in line for line in lines(spoken)) == 1


def test_multistep_says_when_it_steps(tmp_path, spoken):
    solver = caffe.get_solver(solver_text(tmp_path, 'lr_policy: "multistep" gamma: 0.1 stepvalue: 2'))
    solver.step(4)
    assert [line for line in lines(spoken) if "MultiStep" in line] == ["MultiStep Status: Iteration 2, step = 1"]


def test_the_seed_makes_runs_repeatable(tmp_path):
    first, second = (caffe.get_solver(solver_text(tmp_path, "random_seed: 5")) for _ in range(2))
    np.testing.assert_array_equal(first.net.params["conv"][0].data, second.net.params["conv"][0].data)


def test_signals_ask_for_stopping_or_a_snapshot(tmp_path):
    solver = caffe.get_solver(solver_text(tmp_path, "max_iter: 50 snapshot_after_train: true"))
    due = {3: signal.SIGHUP, 5: signal.SIGINT}

    def maybe_signal():
        if solver.iter in due:
            os.kill(os.getpid(), due[solver.iter])

    solver.add_callback(maybe_signal, lambda: None)
    with SignalActions("stop", "snapshot") as actions:
        solver.set_action_function(actions)
        solver.solve()
    assert solver.iter == 6
    assert sorted(path.name for path in tmp_path.glob("*.solverstate")) == [
        "snap_iter_4.solverstate",
        "snap_iter_6.solverstate",
    ]


def test_stopping_interrupts_a_test(tmp_path, spoken):
    solver = caffe.get_solver(solver_text(tmp_path, "test_iter: 100 test_interval: 1"))
    solver.set_action_function(lambda: Action.STOP)
    solver.step(1)
    assert solver.iter == 0
    assert "Test interrupted." in lines(spoken)


def test_a_learned_net_that_is_gone_keeps_its_name():
    assert state.find_learned_net("far/away.caffemodel", "here/x.solverstate") == "far/away.caffemodel"


DATA_NET = """
layer { name: "in/put" type: "Data" top: "x" top: "y" transform_param { crop_size: 2 mirror: true }
  data_param { source: "db" backend: LMDB batch_size: 3 shuffle_window: 4 } }
layer { name: "list" type: "HDF5Data" top: "z" hdf5_data_param { source: "h.txt" batch_size: 2 shuffle: true } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "s"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "silent" type: "Silence" bottom: "z" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "s" bottom: "y" top: "loss" }
"""


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
def test_a_resumed_run_goes_on_with_the_next_records(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(3)
    with new_database("lmdb", "db") as writer:
        for number in range(11):
            pixels = random.integers(0, 255, (4, 4, 3)).astype(np.uint8)
            writer.put(b"%04d" % number, image_datum(pixels, number % 5).SerializeToString())
    with h5py.File("a.h5", "w") as file:
        file["z"] = np.arange(7.0).reshape(7, 1)
    Path("h.txt").write_text("a.h5")
    Path("net.prototxt").write_text(DATA_NET)
    Path("solver.prototxt").write_text(
        'net: "net.prototxt" base_lr: 0.001 lr_policy: "fixed" momentum: 0.9 iter_size: 2 '
        f'snapshot_prefix: "s" snapshot_format: {form} snapshot_after_train: false max_iter: 9'
    )

    def seen(solver, steps):
        rows, net, last = [], solver.net, len(solver.net.layers) - 1
        net.after_forward(lambda at: at == last and rows.append([net.blobs[name].data.copy() for name in "xyz"]))
        solver.step(steps)
        return rows

    solver = caffe.get_solver("solver.prototxt")
    solver.step(3)
    solver.snapshot()
    expected = seen(solver, 3)
    again = caffe.get_solver("solver.prototxt")
    again.restore(next(tmp_path.glob("*.solverstate*")))
    got = seen(again, 3)
    assert len(got) == len(expected) > 0
    for mine, theirs in zip(got, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    assert values(again.net)["ip"][0].tobytes() == values(solver.net)["ip"][0].tobytes()


def test_an_update_in_blocks_equals_one_of_all(monkeypatch):
    """Tensors larger than a block, several smaller ones, and one that is not contiguous."""
    shapes = [(3, 4), (50,), (7, 5), (1,), (2, 2, 2), (40,)]
    results = []
    for block in (8, 1 << 20):
        monkeypatch.setattr(updater, "_BLOCK", block)
        torch.manual_seed(4)
        columns = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
        columns[1][2] = torch.randn(5, 7).t()
        count = 0
        for diffs, data, history in updater.blocks(columns):
            assert all(one.numel() <= block or not two.is_contiguous() for one, two in zip(diffs, data, strict=True))
            torch._foreach_add_(history, diffs, alpha=0.3)
            torch._foreach_sub_(data, history)
            count += 1
        results.append([tensor.tolist() for column in columns for tensor in column])
        assert (count == 1) == (block > 100)
    assert results[0] == results[1]
