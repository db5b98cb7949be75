"""Cases of the kind ``pycaffe``: helpers of the Python side."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.schema.files import parse_text, read_text


def case(name):
    return pytest.mark.parametrize("case", [pytest.param(("pycaffe", name), id=name)], indirect=True)


@case("net_spec")
def test_net_spec(case, caffe, monkeypatch):
    monkeypatch.delitem(importlib.sys.modules, "build", raising=False)
    built = importlib.import_module("build").build()
    assert built == read_text("expected.prototxt", "NetParameter")


@case("coord_map")
def test_coord_map(case, caffe):
    from poseidon.caffe import coord_map
    from poseidon.caffe import layers as L

    data = L.Input(input_param={"shape": {"dim": [2, 1, 100, 100]}})
    conv = L.Convolution(data, num_output=4, kernel_size=5, stride=2, pad=10)
    pool = L.Pooling(conv, pool=0, kernel_size=2, stride=2)
    up = L.Deconvolution(pool, convolution_param={"num_output": 4, "kernel_size": 7, "stride": 4, "pad": 0})
    want = case.expected()
    axis, a, b = coord_map.coord_map_from_to(up, data)
    assert axis == want["coord_map"]["axis"]
    case.check("a, b", [float(np.squeeze(a)), float(np.squeeze(b))], [want["coord_map"]["a"], want["coord_map"]["b"]])
    cropped = coord_map.crop(up, data).to_proto()
    assert cropped == parse_text(want["crop_proto"], "NetParameter")


@case("io_functions")
def test_io_functions(case, caffe):
    from poseidon.caffe import io

    arrays = case.arrays
    crops = io.oversample(arrays["oversample/in"], arrays["oversample/crop"])
    case.check("oversample", crops, arrays["oversample/out"])
    blob = io.array_to_blobproto(arrays["blobproto/array"])
    assert blob.SerializeToString() == Path("blob.binaryproto").read_bytes()
    case.check("blobproto", io.blobproto_to_array(blob), arrays["blobproto/array"])
    for kind in ("u8", "float"):
        datum = io.array_to_datum(arrays[f"datum_{kind}/array"])
        assert datum.SerializeToString() == Path(f"datum_{kind}.bin").read_bytes()
        case.check(kind, io.datum_to_array(datum), arrays[f"datum_{kind}/array"])
    limits = case.meta["tolerance_resize"]
    resized = io.resize_image(arrays["resize/in"], arrays["resize/out_order1"].shape[:2])
    case.check("resize", resized, arrays["resize/out_order1"], **limits)
    resized = io.resize_image(arrays["resize_nch/in"], arrays["resize_nch/out"].shape[:2])
    case.check("resize of 4 channels", resized, arrays["resize_nch/out"], **limits)


@case("transformer")
def test_transformer(case, caffe):
    from poseidon.caffe import io

    arrays = case.arrays
    for name, settings in case.meta["settings"].items():
        shape = (1, *arrays[f"{name}/preprocess"].shape)
        transformer = io.Transformer({"data": shape})
        for setting, value in settings.items():
            getattr(transformer, f"set_{setting}")("data", arrays[value] if isinstance(value, str) else value)
        processed = transformer.preprocess("data", arrays["image"])
        case.check(f"{name} preprocess", processed, arrays[f"{name}/preprocess"])
        case.check(f"{name} deprocess", transformer.deprocess("data", processed), arrays[f"{name}/deprocess"])
