from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.caffe.proto import caffe_pb2
from poseidon.caffe.schema import BlobProto, NetParameter, messages
from poseidon.caffe.schema.files import parse_binary, parse_text, read_binary, read_text, write_binary
from poseidon.caffe.schema.packed import append_floats, read_floats
from poseidon.caffe.schema.stub import stub_text
from poseidon.caffe.upgrade import upgrade_net
from poseidon.errors import ConfigError


def test_defaults_and_enums_are_caffes():
    layer = caffe_pb2.LayerParameter()
    assert layer.convolution_param.bias_term is True
    assert layer.lrn_param.beta == 0.75
    assert layer.batch_norm_param.moving_average_fraction == pytest.approx(0.999)
    assert caffe_pb2.SolverParameter().solver_mode == caffe_pb2.SolverParameter.GPU
    assert (caffe_pb2.TRAIN, caffe_pb2.TEST) == (0, 1)
    assert caffe_pb2.PoolingParameter.PoolMethod.Value("AVE") == 1
    assert caffe_pb2.BlobShape.DESCRIPTOR.fields_by_name["dim"].GetOptions().packed


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("layer {\n  nmae: 'x'\n}", ["net.prototxt:2:3", "LayerParameter", "'nmae'", "did you mean 'name'"]),
        (
            "layer { pooling_param { pool: MIN } }",
            ["net.prototxt:1:31", "PoolMethod", "'MIN'", "MAX, AVE, STOCHASTIC"],
        ),
        ("layer { name: 'x'", ["net.prototxt:1", "this brace is never closed"]),
        ("layer { clip_param { min: 1 } }", ["net.prototxt", "layer[0].clip_param.max"]),
    ],
)
def test_errors_in_text_say_where(text, parts):
    with pytest.raises(ConfigError) as error:
        parse_text(text, NetParameter, "net.prototxt")
    for part in parts:
        assert part in str(error.value)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.prototxt"):
        read_text(tmp_path / "none.prototxt", NetParameter)
    truncated = tmp_path / "cut.caffemodel"
    layer = caffe_pb2.NetParameter(name="a net with a name", layer=[{"name": "l", "type": "ReLU"}])
    write_binary(truncated, layer)
    truncated.write_bytes(truncated.read_bytes()[:-3])
    with pytest.raises(ConfigError, match=r"cut\.caffemodel.*truncated"):
        read_binary(truncated, NetParameter)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "model.caffemodel"
    write_binary(target, caffe_pb2.NetParameter(name="old"))

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="disk full"):
        write_binary(target, caffe_pb2.NetParameter(name="new"))
    assert read_binary(target, NetParameter).name == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model.caffemodel"]


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=300), st.sampled_from(["data", "double_data"]))
def test_packed_floats_pass_both_ways(values, field):
    proto = caffe_pb2.BlobProto(num=3, width=7)
    append_floats(proto, field, np.asarray(values, np.float32))
    assert list(getattr(proto, field)) == values
    again = parse_binary(proto.SerializeToString(), BlobProto)
    np.testing.assert_array_equal(read_floats(again, field), values)


def test_v0_padding_layer_is_folded_into_the_convolution():
    net = parse_text(
        """
        input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8
        layers { layer { name: "pad" type: "padding" pad: 2 } bottom: "data" top: "padded" }
        layers {
          layer { name: "c" type: "conv" num_output: 4 kernelsize: 5 stride: 2 biasterm: false blobs_lr: 1 blobs_lr: 2
                  weight_filler { type: "gaussian" std: 0.1 } }
          bottom: "padded" top: "c"
        }
        layers { layer { name: "d" type: "data" source: "db" batchsize: 7 meanfile: "m" scale: 2 } top: "d" }
        """,
        NetParameter,
    )
    assert upgrade_net(net)
    assert not upgrade_net(net)
    data, conv, db = net.layer
    assert (data.type, conv.type, db.type) == ("Input", "Convolution", "Data")
    assert list(conv.bottom) == ["data"]
    settings = conv.convolution_param
    assert (list(settings.pad), list(settings.kernel_size), list(settings.stride)) == ([2], [5], [2])
    assert settings.bias_term is False
    assert [spec.lr_mult for spec in conv.param] == [1, 2]
    assert (db.data_param.batch_size, db.transform_param.mean_file, db.transform_param.scale) == (7, "m", 2)


def test_the_types_that_checkers_see_are_those_of_the_tables():
    written = Path(messages.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    assert written == stub_text(), "run: python -m poseidon.caffe.schema.stub"


CHECKED = """
from messages import LayerParameter, NetParameter, SolverParameter

net, layer, solver = NetParameter(layer=[{"name": "l"}]), LayerParameter(), SolverParameter(base_lr=0.1)
reveal_type(net.layer[0].convolution_param.kernel_size)
reveal_type(layer.pooling_param.pool)
reveal_type(solver.net_param.name)
solver.base_lr = "fast"
layer.nmae = "typo"
LayerParameter(top="data", typ="Data")
"""


def test_a_type_checker_knows_the_fields_of_messages(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api")
    monkeypatch.chdir(tmp_path)
    Path("messages.pyi").write_text(stub_text())
    Path("script.py").write_text(CHECKED)
    report, _, status = api.run(["--strict", "script.py"])
    assert status == 1
    for part in (
        'script.py:5: note: Revealed type is "google.protobuf.internal.containers.RepeatedScalarFieldContainer[int]"',
        'script.py:6: note: Revealed type is "int"',
        'script.py:7: note: Revealed type is "str"',
        "script.py:8: error: Incompatible types in assignment",
        'script.py:9: error: "LayerParameter" has no attribute "nmae"',
        'script.py:10: error: Unexpected keyword argument "typ"',
    ):
        assert part in report


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('layer {\n  name: "x"\n', r"n:1: this brace is never closed: a } is missing \(in: layer \{\)"),
        (
            'layer {\n  name: "x"\nlayer {\n}\n',
            "n:3:1: 'layer' is inside what line 1 opens, .* a } is missing before it",
        ),
        (
            'layer {\n  param {\n    lr_mult: 1\n  type: "ReLU"\n}\n',
            "n:4:3: 'type' is inside what line 2 opens, .* a } is missing before it",
        ),
        ('layer { name: "x" }\n}\n', r"n:2: a brace is closed that was never opened \(in: }\)"),
        ('layer { nam: "{" }  # {', "n:1:9: LayerParameter has no field 'nam'; did you mean 'name'"),
    ],
)
def test_a_missing_brace_is_named(text, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse_text(text, NetParameter, "n")
