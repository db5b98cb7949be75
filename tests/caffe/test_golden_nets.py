"""Cases of the kinds ``layers`` and ``nets``: blobs and gradients after each pass."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from caffe_golden import case_names, check_params, set_params

PLAIN_LAYERS = [name for name in case_names("layers") if name not in ("dropout_train", "hdf5output")]
PLAIN_NETS = [n for n in case_names("nets") if n not in ("filler_stats", "net_legacy_input", "net_rules")]


def cases(kind, names):
    return pytest.mark.parametrize("case", [pytest.param((kind, n), id=n) for n in names], indirect=True)


@cases("layers", PLAIN_LAYERS)
def test_layer(case, caffe):
    replay(case, caffe)


@cases("nets", PLAIN_NETS)
def test_net(case, caffe):
    replay(case, caffe)


def replay(case, caffe):
    meta, arrays = case.meta, case.arrays
    net = caffe.Net("net.prototxt", getattr(caffe, meta.get("phase", "TEST")))
    if meta.get("params_from_filler"):
        check_params(case, net, arrays, "param/")
    else:
        set_params(net, arrays, "param/")
    if "memory/data" in arrays:
        net.set_input_arrays(arrays["memory/data"], arrays["memory/labels"])
    for name in ("layer_names", "blob_names"):
        if name in meta:
            assert list(getattr(net, f"_{name}")) == meta[name]
    if "layer_names" in meta:
        if meta["inputs"]:  # the inputs that the case fills; empty where it fills none
            assert list(net.inputs) == meta["inputs"]
        assert list(net.outputs) == meta["outputs"]
    for step in range(max(1, meta.get("steps", 0))):
        prefix = f"step{step}/" if meta.get("steps") else ""
        part = {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
        check_forward(case, net, part)
        if meta.get("backward"):
            if not meta.get("no_clear") or step == 2:
                net.clear_param_diffs()
            check_backward(case, net, part)


def check_forward(case, net, part):
    for name, value in under("in/", part):
        blob = net.blobs[name]
        if tuple(blob.shape) != value.shape:
            blob.reshape(*value.shape)
        blob.data[...] = value
    total = net._forward(0, len(net.layers) - 1)
    if "total_loss" in part:
        case.check("total_loss", total, part["total_loss"])
    for name, value in [*under("mid/", part), *under("out/", part)]:
        case.check(name, net.blobs[name].data, value)
    check_params(case, net, part, "param_after/")


def check_backward(case, net, part):
    for name, value in under("topdiff/", part):
        net.blobs[name].diff[...] = value
    net._backward(len(net.layers) - 1, 0)
    for name, value in under("bottomdiff/", part):
        case.check(f"diff of {name}", net.blobs[name].diff, value)
    check_params(case, net, part, "paramdiff/", "diff")


def under(prefix, part):
    return [(key[len(prefix) :], value) for key, value in part.items() if key.startswith(prefix)]


@cases("layers", ["dropout_train"])
def test_dropout_in_training(case, caffe):
    arrays, factor = case.arrays, 1 / (1 - case.meta["ratio"])
    net = caffe.Net("net.prototxt", caffe.TRAIN)
    net.blobs["data"].data[...] = arrays["in/data"]
    net._forward(0, len(net.layers) - 1)
    kept = net.blobs["out"].data != 0
    assert abs(kept.mean() - (1 - case.meta["ratio"])) < 0.05
    case.check("kept values", net.blobs["out"].data, arrays["in/data"] * factor * kept)
    net.blobs["out"].diff[...] = arrays["topdiff/out"]
    net._backward(len(net.layers) - 1, 0)
    case.check("gradient", net.blobs["data"].diff, arrays["topdiff/out"] * factor * kept)


@cases("layers", ["hdf5output"])
def test_hdf5_output(case, caffe):
    import h5py

    arrays = case.arrays
    net = caffe.Net("net.prototxt", caffe.TEST)
    for name, value in under("in/", arrays):
        net.blobs[name].data[...] = value
    net._forward(0, len(net.layers) - 1)
    del net
    gc.collect()
    with h5py.File("out.h5", "r") as file:
        assert sorted(file) == sorted(name for name, _ in under("file/", arrays))
        for name, value in under("file/", arrays):
            case.check(name, file[name][()], value)


@cases("nets", ["filler_stats"])
def test_random_fillers(case, caffe):
    caffe.set_random_seed(1)
    net = caffe.Net("net.prototxt", caffe.TEST)
    for layer, want in case.expected().items():
        values = net.params[layer][0].data.astype(np.float64)
        assert list(values.shape) == want["shape"], layer
        assert values.std() == pytest.approx(want["std"], rel=0.03), layer
        assert (values != 0).mean() == pytest.approx(want["share_nonzero"], abs=0.01), layer
        if "uniform" in layer or "xavier" in layer:
            spread = want["max"] - want["min"]
            assert values.min() == pytest.approx(want["min"], abs=0.01 * spread), layer
            assert values.max() == pytest.approx(want["max"], abs=0.01 * spread), layer
        if "unitball" in layer:
            np.testing.assert_allclose(values.reshape(len(values), -1).sum(1), 1, rtol=1e-5)


@cases("nets", ["net_legacy_input"])
def test_old_inputs(case, caffe):
    for file, want in case.expected().items():
        net = caffe.Net(file, caffe.TEST)
        assert list(net._layer_names) == want["layer_names"]
        assert [layer.type for layer in net.layers] == want["types"]
        assert {name: list(blob.shape) for name, blob in net.blobs.items()} == want["shapes"]
        assert list(net.inputs) == want["inputs"]
        assert list(net.outputs) == want["outputs"]


@cases("nets", ["net_rules"])
def test_include_and_exclude_rules(case, caffe):
    for want in case.expected():
        net = caffe.Net("net.prototxt", getattr(caffe, want["phase"]), level=want["level"], stages=want["stages"])
        assert list(net._layer_names) == want["layer_names"]
        assert list(net._blob_names) == want["blob_names"]
        assert list(net.outputs) == want["outputs"]
