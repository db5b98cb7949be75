"""Cases of the kind ``formats``: model files, upgrades and data layers."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest
from caffe_golden import check_params

from poseidon.caffe.schema import NetParameter, SolverParameter
from poseidon.caffe.schema.files import read_binary, read_text
from poseidon.caffe.upgrade import read_net, upgrade_solver


def case(name):
    return pytest.mark.parametrize("case", [pytest.param(("formats", name), id=name)], indirect=True)


@case("caffemodel")
@pytest.mark.parametrize("weights", ["weights.caffemodel", "weights.caffemodel.h5"])
def test_weights_are_read(case, caffe, weights):
    arrays = case.arrays
    net = caffe.Net("net.prototxt", caffe.TEST)
    net.copy_from(weights)
    check_params(case, net, arrays, "param/")
    net.blobs["data"].data[...] = arrays["in/data"]
    net._forward(0, len(net.layers) - 1)
    case.check("ip", net.blobs["ip"].data, arrays["out/ip"])


@case("caffemodel")
def test_weights_are_written_as_caffe_writes_them(case, caffe):
    net = caffe.Net("net.prototxt", caffe.TEST, weights="weights.caffemodel")
    net.save("ours.caffemodel")
    net.save_hdf5("ours.h5")
    assert read_binary("ours.caffemodel", NetParameter) == read_binary("weights.caffemodel", NetParameter)
    with h5py.File("ours.h5") as ours, h5py.File("weights.caffemodel.h5") as theirs:
        assert datasets(ours) == datasets(theirs)


def datasets(file):
    found = {}
    file.visititems(lambda name, item: found.update({name: getattr(item, "shape", None)}))
    return found


@case("upgrade_v1")
def test_v1_layers_are_upgraded(case):
    for old, expected in (("old", "expected_new"), ("old_types", "expected_new_types")):
        assert read_net(f"{old}.prototxt") == read_text(f"{expected}.prototxt", NetParameter)


@case("upgrade_other")
def test_other_old_forms_are_upgraded(case):
    files = sorted(Path().glob("old_*.prototxt"))
    assert len(files) == 9
    for file in files:
        expected = file.with_name(file.name.replace("old_", "expected_"))
        if "solver" in file.name:
            solver = read_text(file, SolverParameter)
            upgrade_solver(solver, file.name)
            assert solver == read_text(expected, SolverParameter)
        else:
            assert read_net(file) == read_text(expected, NetParameter)


@case("data_layer")
def test_data_layer(case, caffe):
    check_batches(case, caffe)


@case("image_data")
def test_image_data(case, caffe):
    check_batches(case, caffe)


@case("window_data")
def test_window_data(case, caffe):
    check_batches(case, caffe, steps=1)


def check_batches(case, caffe, steps=3):
    arrays = case.arrays
    names = sorted(path.stem.removeprefix("net_") for path in Path().glob("net_*.prototxt"))
    for name in names:
        phase = case.meta.get("nets", {}).get(name, {}).get("phase", case.meta.get("phase", "TEST"))
        net = caffe.Net(f"net_{name}.prototxt", getattr(caffe, phase))
        # Resized pixels may round differently by one, which transform_param's scale then multiplies.
        slack = {"atol": 1.01} if name in ("resize", "scaled") else {}
        for step in range(steps):
            net._forward(0, len(net.layers) - 1)
            for blob in ("data", "label"):
                key = f"{name}/out/{blob}" if steps == 1 else f"{name}/step{step}/out/{blob}"
                case.check(key, net.blobs[blob].data, arrays[key], **slack)
