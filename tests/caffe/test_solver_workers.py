"""Several workers train as one with the total batch, and hold the same bits."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from shared_rows import knowing_the_layer, shared_rows, values, write_solver  # noqa: F401 - a fixture

import poseidon.caffe as caffe
from poseidon.caffe.distributed import Together
from poseidon.caffe.io.images import encode_image
from poseidon.engine.assemble import ExchangeOptions
from poseidon.planning.cluster import Cluster, Link
from ranks import run_ranks

STEPS = 5
# A slow link and a fast device, so that factors and rows pay for small layers too.
CLUSTER = Cluster(2, 1, between=Link(1e6, 1e-6), flops=1e12)


def train(path, routes):
    solver = caffe.get_solver(path, lambda s: Together(s.net, ExchangeOptions(routes, CLUSTER, 60)))
    solver.step(STEPS)
    result = values(solver.net), solver._workers.plan.routes
    solver.close()
    solver.step(1)  # alone
    return result


def train_alone(folder, batch, text=""):
    folder.mkdir()
    solver = caffe.get_solver(write_solver(folder, batch, text))
    start = values(solver.net)
    solver.step(STEPS)
    return start, values(solver.net)


def assert_close(got, want):
    assert got.keys() == want.keys()
    for name, blobs in want.items():
        for number, blob in enumerate(blobs):
            np.testing.assert_allclose(got[name][number], blob, rtol=2e-4, atol=2e-6, err_msg=f"{name} {number}")


def assert_same_bits(results):
    for other in results[1:]:
        for name, blobs in results[0].items():
            assert [blob.tobytes() for blob in blobs] == [blob.tobytes() for blob in other[name]], name


@pytest.mark.parametrize(
    ("size", "text", "routes"),
    [
        (2, "", {"ip*": "factors", "embed": "rows"}),
        (4, "", None),
        (2, "iter_size: 2 clip_gradients: 0.7 type: 'Nesterov'", {"ip*": "factors", "embed": "rows"}),
        (2, "", {"*": "allreduce"}),
    ],
    ids=["factors", "planned", "iter_size", "allreduce"],
)
def test_workers_equal_one_with_the_total_batch(tmp_path, size, text, routes):
    start, alone = train_alone(tmp_path / "alone", 12, text)
    shared = write_solver(tmp_path, 12 // size, text)
    results = run_ranks(knowing_the_layer, size, train, str(shared), routes)
    params = [result for result, _ in results]
    assert_same_bits(params)
    assert_close(params[0], alone)
    assert not np.allclose(params[0]["ip1"][0], start["ip1"][0])
    chosen = results[0][1]
    assert chosen["conv"] == chosen["twin_a"] == "allreduce"
    if routes == {"*": "allreduce"}:
        assert set(chosen.values()) == {"allreduce"}
    else:
        assert chosen["ip1"] == chosen["ip2"] == "factors"
        assert chosen["embed"] == "rows"


def train_and_listen(path):
    solver = caffe.get_solver(path)
    mine, shown = [], []
    last = len(solver.net.layers) - 1
    solver.net.after_forward(lambda i: mine.append(float(solver.net.blobs["loss"].data)) if i == last else None)
    solver.output_listeners.append(lambda which, _, outputs: shown.append((which, outputs[0].value)))
    solver.step(3)
    return mine, shown


def test_displayed_outputs_are_means_over_the_workers(tmp_path):
    (first, shown), (second, other) = run_ranks(
        knowing_the_layer, 2, train_and_listen, str(write_solver(tmp_path, 4, "display: 1"))
    )
    assert first != second
    assert shown == other
    assert [which for which, _ in shown] == ["train"] * 3
    assert [value for _, value in shown] == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])


def train_batch_norm(path):
    solver = caffe.get_solver(path)
    solver.step(2)
    apart = solver.net.params["bn"][0].data.copy()
    solver.snapshot()
    return apart, values(solver.net)


def test_running_averages_are_worker_zeros_in_a_snapshot(tmp_path):
    path = write_solver(tmp_path, 4, "")
    net = tmp_path / "net.prototxt"
    layer = 'layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" }\nlayer { name: "embed"'
    net.write_text(net.read_text().replace('layer { name: "embed"', layer))
    (first, params), (second, other) = run_ranks(knowing_the_layer, 2, train_batch_norm, str(path))
    assert not np.array_equal(first, second)
    assert_same_bits([params, other])
    np.testing.assert_array_equal(params["bn"][0], first)


def resume(path):
    solver = caffe.get_solver(path)
    solver.step(2)
    solver.snapshot()
    solver.step(2)
    # A new solver whose data start again where the first one's stood.
    again = caffe.get_solver(path)
    again.net.layers[0]._next = solver.net.layers[0]._next - 2 * solver.net.layers[0]._stride
    again.restore(f"{again.param.snapshot_prefix}_iter_2.solverstate")
    again.step(2)
    return values(solver.net), values(again.net), again.iter


def test_a_job_resumes_exactly_from_worker_zeros_snapshot(tmp_path):
    results = run_ranks(knowing_the_layer, 2, resume, str(write_solver(tmp_path, 4, "")))
    for went_on, resumed, iteration in results:
        assert iteration == 4
        assert_close(resumed, went_on)
    assert sorted(path.name for path in tmp_path.glob("snap*")) == ["snap_iter_2.caffemodel", "snap_iter_2.solverstate"]


def disagree(paths):
    import torch.distributed as dist

    caffe.get_solver(paths[dist.get_rank()])


def test_different_nets_are_refused_by_name(tmp_path):
    paths = []
    for rank, outputs in enumerate((12, 13)):
        folder = tmp_path / str(rank)
        folder.mkdir()
        path = write_solver(folder, 4, "")
        net = folder / "net.prototxt"
        net.write_text(net.read_text().replace("num_output: 12", f"num_output: {outputs}"))
        paths.append(str(path))
    with pytest.raises(AssertionError, match=r"ip1\.0 has shape \[12, 64\] on rank 0 and \[13, 64\] on rank 1"):
        run_ranks(knowing_the_layer, 2, disagree, paths)


SHUFFLED = """
layer { name: "pictures" type: "ImageData" top: "x" top: "y" transform_param { crop_size: 3 mirror: true }
  image_data_param { source: "list.txt" batch_size: %(batch)d shuffle: true rand_skip: 4 } }
layer { name: "rows" type: "HDF5Data" top: "z" hdf5_data_param {
  source: "files.txt" batch_size: %(batch)d shuffle: true } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "s"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "silent" type: "Silence" bottom: "z" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "s" bottom: "y" top: "loss" }
"""


def see(folder, resume=None, steps=7):
    """Return what a solver's net sees in each iteration; snapshot after the third."""
    os.chdir(folder)
    solver = caffe.get_solver("solver.prototxt")
    seen, last = [], len(solver.net.layers) - 1
    blobs = solver.net.blobs
    solver.net.after_forward(lambda at: at == last and seen.append([blobs[name].data.copy() for name in "xyz"]))
    if resume is not None:
        solver.restore(resume)
    solver.step(steps)
    return seen


def test_shuffled_workers_see_what_one_sees_and_one_goes_on_where_they_stopped(tmp_path, monkeypatch):
    random = np.random.default_rng(1)
    for number in range(11):
        pixels = random.integers(0, 256, (5, 6, 3)).astype(np.uint8)
        (tmp_path / f"{number}.png").write_bytes(encode_image(pixels, "png"))
    (tmp_path / "list.txt").write_text("".join(f"{tmp_path}/{number}.png {number % 5}\n" for number in range(11)))
    for number, rows in enumerate((4, 5)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["z"] = random.random((rows, 2))
    (tmp_path / "files.txt").write_text(f"{tmp_path}/0.h5\n{tmp_path}/1.h5\n")
    (tmp_path / "solver.prototxt").write_text(
        'net: "net.prototxt" base_lr: 0.0001 lr_policy: "fixed" snapshot: 3 snapshot_prefix: "s" max_iter: 7'
    )
    (tmp_path / "net.prototxt").write_text(SHUFFLED % {"batch": 2})
    first, second = run_ranks(knowing_the_layer, 2, see, str(tmp_path))
    together = [
        [np.concatenate(blobs) for blobs in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(first, second, strict=True)
    ]
    # Without a seed in the solver: the snapshot tells it.
    (tmp_path / "net.prototxt").write_text(SHUFFLED % {"batch": 4})
    monkeypatch.chdir(tmp_path)
    alone = see(tmp_path, "s_iter_3.solverstate", 4)
    assert len(together) == 7
    for mine, theirs in zip(alone, together[3:], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    rows = [row.tobytes() for _, _, blob in together for row in blob]
    assert len(set(rows[:9])) == len(set(rows[9:18])) == 9, "not every row once per pass"
    assert rows[:9] != rows[9:18]
