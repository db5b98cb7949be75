"""Cases of the kind ``pycaffe``: helpers of the Python side."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from poseidon.caffe.schema import NetParameter
from poseidon.caffe.schema.files import parse_text, read_text


def case(name):
    return pytest.mark.parametrize("case", [pytest.param(("pycaffe", name), id=name)], indirect=True)


@case("net_spec")
def test_net_spec(case, caffe):
    built = importlib.import_module("build").build()
    assert built == read_text("expected.prototxt", NetParameter)


@case("coord_map")
def test_coordinate_map_and_crop(case, caffe):
    from poseidon.caffe import layers as L
    from poseidon.caffe import params as P

    n = caffe.NetSpec()
    n.data = L.Input(shape=[{"dim": [2, 1, 100, 100]}])
    n.conv = L.Convolution(n.data, num_output=4, kernel_size=5, stride=2, pad=10)
    n.pool = L.Pooling(n.conv, pool=P.Pooling.MAX, kernel_size=2, stride=2)
    n.up = L.Deconvolution(n.pool, convolution_param={"num_output": 4, "kernel_size": 7, "stride": 4, "pad": 0})
    want = case.expected()
    axis, scale, shift = caffe.coord_map.coord_map_from_to(n.up, n.data)
    assert axis == want["coord_map"]["axis"]
    case.check("scale", np.ravel(scale), np.ravel(want["coord_map"]["a"]))
    case.check("shift", np.ravel(shift), np.ravel(want["coord_map"]["b"]))
    crop = caffe.coord_map.crop(n.up, n.data).to_proto()
    assert crop == parse_text(want["crop_proto"], NetParameter)


@case("io_functions")
def test_oversample_and_resize(case, caffe):
    arrays = case.arrays
    crops = caffe.io.oversample(arrays["oversample/in"], arrays["oversample/crop"])
    case.check("oversample", crops, arrays["oversample/out"])
    loose = case.meta["tolerance_resize"]
    case.check("resize", caffe.io.resize_image(arrays["resize/in"], (4, 5)), arrays["resize/out_order1"], **loose)
    resized = caffe.io.resize_image(arrays["resize_nch/in"], (3, 9))
    case.check("resize of 4 channels", resized, arrays["resize_nch/out"], **loose)


@case("io_functions")
def test_arrays_and_messages(case, caffe):
    arrays, pb = case.arrays, caffe.io.caffe_pb2
    values = arrays["blobproto/array"]
    assert caffe.io.array_to_blobproto(values) == pb.BlobProto.FromString(Path("blob.binaryproto").read_bytes())
    stored = caffe.io.blobprotovector_str_to_arraylist(Path("vec.binaryproto").read_bytes())
    again = pb.BlobProtoVector.FromString(caffe.io.arraylist_to_blobprotovecor_str(stored))
    assert again == pb.BlobProtoVector.FromString(Path("vec.binaryproto").read_bytes())
    for kind in ("u8", "float"):
        datum = pb.Datum.FromString(Path(f"datum_{kind}.bin").read_bytes())
        back = caffe.io.datum_to_array(datum)
        case.check(f"datum {kind}", back, arrays[f"datum_{kind}/array"])
        assert caffe.io.array_to_datum(arrays[f"datum_{kind}/array"], datum.label) == datum


@case("transformer")
@pytest.mark.parametrize("setting", ["plain", "transpose", "full"])
def test_transformer(case, caffe, setting):
    arrays, options = case.arrays, dict(case.meta["settings"][setting])
    height, width, channels = arrays["image"].shape
    shape = (1, height, width, channels) if setting == "plain" else (1, channels, height, width)
    if "mean" in options:
        options["mean"] = arrays[options["mean"]]
    transformer = caffe.io.Transformer({"data": shape})
    for name, value in options.items():
        getattr(transformer, f"set_{name}")("data", value)
    done = transformer.preprocess("data", arrays["image"])
    case.check("preprocess", done, arrays[f"{setting}/preprocess"])
    case.check("deprocess", transformer.deprocess("data", done), arrays[f"{setting}/deprocess"])
