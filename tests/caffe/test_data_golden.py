"""Cases of the kind ``formats`` that concern databases: read, written and computed as Caffe does."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe.io.database import open_database
from poseidon.caffe.io.datum import datum_values, parse_datum
from poseidon.caffe.schema import BlobProto
from poseidon.caffe.schema.files import read_binary
from poseidon.caffe.tools.convert_imageset import Conversion, convert_imageset
from poseidon.caffe.tools.extract_features import extract_features
from poseidon.caffe.tools.image_mean import compute_image_mean


def case(name):
    return pytest.mark.parametrize("case", [pytest.param(("formats", name), id=name)], indirect=True)


def contents(backend, path):
    keys, datums = [], []
    for key, value in open_database(backend, path).records():
        keys.append(key.decode())
        datums.append(parse_datum(value, path))
    return keys, datums


def check_imageset(case, backend, path, **tolerance):
    arrays = case.arrays
    keys, datums = contents(backend, path)
    assert keys == list(arrays["keys"])
    assert [datum.label for datum in datums] == list(arrays["label"])
    values = np.stack([datum_values(datum, "native", path) for datum in datums]).astype(int)
    case.check(path, values, arrays["datum"].astype(int), **tolerance)
    return datums


@case("imageset_lmdb")
def test_lmdb_is_read(case):
    check_imageset(case, "lmdb", "db_lmdb", atol=0)


@case("imageset_leveldb")
@pytest.mark.parametrize("folder", ["db_fresh", "db_reopened"])
def test_leveldb_is_read(case, folder):
    check_imageset(case, "leveldb", folder, atol=0)


@case("imageset_lmdb")
@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_imageset_is_written_byte_for_byte(case, backend):
    assert convert_imageset("images/", "list.txt", "ours", backend, Conversion()) == 12
    check_imageset(case, backend, "ours", atol=0)
    theirs = [bytes(value) for _, value in open_database("lmdb", "db_lmdb").records()]
    assert [bytes(value) for _, value in open_database(backend, "ours").records()] == theirs


@case("imageset_leveldb")
def test_resized_imageset_is_written(case):
    convert_imageset("images/", "list.txt", "ours", "leveldb", Conversion(resize_height=8, resize_width=6))
    check_imageset(case, "leveldb", "ours", atol=0)


@case("imageset_lmdb")
def test_mean_is_computed_and_written(case):
    mean = compute_image_mean("db_lmdb", "lmdb", "ours.binaryproto")
    case.check("mean", mean[None], case.arrays["mean"])
    ours = read_binary("ours.binaryproto", BlobProto)
    assert [field.name for field, _ in ours.ListFields()] == case.meta["mean_proto_fields"]
    case.check("file", list(ours.data), list(read_binary("mean.binaryproto", BlobProto).data))


@case("imageset_leveldb")
def test_mean_of_leveldb(case):
    case.check("mean", compute_image_mean("db_fresh", "leveldb")[None], case.arrays["mean"], atol=1e-3)


@case("extract_features")
@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_features_are_extracted(case, backend):
    counts = extract_features("weights.caffemodel", "net.prototxt", ["conv", "ip"], ["a", "b"], 3, backend)
    assert counts == [12, 12]
    for ours, theirs in (("a", "feat_conv"), ("b", "feat_ip")):
        keys, datums = contents(backend, ours)
        assert keys == list(case.arrays[f"{theirs}/keys"])
        assert [field.name for field, _ in datums[0].ListFields()] == case.meta["datum_fields"]
        values = [datum_values(datum, "native", ours) for datum in datums]
        case.check(ours, values, case.arrays[f"{theirs}/datum"])


@case("extract_features")
def test_features_in_leveldb_are_read(case):
    keys, datums = contents("leveldb", "feat_ip_leveldb")
    assert keys == list(case.arrays["feat_ip/keys"])
    case.check("ip", [datum_values(datum, "native", "db") for datum in datums], case.arrays["feat_ip/datum"])
