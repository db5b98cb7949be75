"""Nets written in Python: names, settings, graphs, coordinate maps, drawings."""

from __future__ import annotations

import numpy as np
import pytest

from poseidon.caffe import TEST, TRAIN, Net, NetSpec, coord_map, draw, to_proto
from poseidon.caffe import layers as L
from poseidon.caffe import params as P
from poseidon.caffe.net_spec import assign_proto, param_name_dict
from poseidon.caffe.schema import LayerParameter, NetParameter, NetState
from poseidon.errors import ConfigError


def test_the_layers_package_is_also_the_way_to_write_layers():
    from poseidon.caffe.layers import pooling

    assert L.pooling is pooling
    assert L.SomethingOfTheUsers(ntop=1).fn.type_name == "SomethingOfTheUsers"
    with pytest.raises(AttributeError, match="no_such_module"):
        L.no_such_module  # noqa: B018


def test_settings_go_to_the_layers_own_message_or_to_the_layer():
    top = L.Convolution(L.Input(), num_output=3, kernel_size=[3, 5], pad=1, loss_weight=2, engine=P.Convolution.CAFFE)
    layer = top.to_proto().layer[1]
    assert list(layer.convolution_param.kernel_size) == [3, 5]
    assert list(layer.convolution_param.pad) == [1]
    assert layer.convolution_param.engine == 1
    assert list(layer.loss_weight) == [2]
    assert param_name_dict()["Pooling"] == "pooling"
    assert param_name_dict()["BatchNorm"] == "batch_norm"


def test_values_may_be_numpy_scalars_tuples_dicts_or_messages():
    layer = LayerParameter()
    assign_proto(layer, "include", {"phase": TEST, "stage": ("a", "b")})
    assign_proto(layer, "param", [{"lr_mult": np.float32(0.5)}, {}])
    assign_proto(layer, "blobs", [])
    assign_proto(layer, "convolution_param", {"num_output": np.int64(4), "weight_filler": {"type": "xavier"}})
    copy = LayerParameter()
    assign_proto(copy, "convolution_param", layer.convolution_param)
    assert list(layer.include[0].stage) == ["a", "b"]
    assert [param.lr_mult for param in layer.param] == [0.5, 1]
    assert copy.convolution_param == layer.convolution_param
    with pytest.raises(AttributeError, match=r"LayerParameter has no field 'kernel'"):
        assign_proto(layer, "kernel", 3)


def test_a_setting_no_layer_has_is_named_with_its_layer():
    n = NetSpec()
    n.data = L.Input()
    n.conv = L.Convolution(n.data, num_outputs=3)
    with pytest.raises(ConfigError, match=r"'conv' \(Convolution\).*num_outputs"):
        n.to_proto()


def test_shared_inputs_are_written_once_and_unnamed_layers_get_names():
    n = NetSpec()
    data = L.Input(shape={"dim": [1, 2]})
    first = L.InnerProduct(data, num_output=2)
    second = L.ReLU(first, in_place=True)
    n.sum = L.Eltwise(first, L.Power(second), L.Power(data))
    L.Silence(n.sum, ntop=0)
    net = n.to_proto()
    assert [layer.name for layer in net.layer] == ["Input1", "InnerProduct1", "ReLU1", "Power1", "Power2", "sum"]
    assert list(net.layer[2].top) == ["InnerProduct1"]
    assert list(net.layer[-1].bottom) == ["InnerProduct1", "Power1", "Power2"]


def test_tops_can_be_reached_replaced_and_removed_by_name():
    n = NetSpec()
    n["data/raw"], n.label = L.Data(ntop=2, name="source")
    n.extra = L.ReLU(n["data/raw"])
    del n.extra
    with pytest.raises(AttributeError, match=r"no top 'extra'.*data/raw, label"):
        n.extra  # noqa: B018
    assert [(layer.name, list(layer.top)) for layer in n.to_proto().layer] == [("source", ["data/raw", "label"])]


def test_what_is_no_top_is_refused():
    with pytest.raises(TypeError, match="Silence input 0 is not a Top"):
        L.Silence(L.Data(ntop=2), ntop=0)
    n = NetSpec()
    n.data = 5
    with pytest.raises(ConfigError, match=r"'data'.*int"):
        n.to_proto()
    with pytest.raises(AttributeError, match=r"'Poling'.*Pooling"):
        P.Poling  # noqa: B018


def test_very_deep_nets_can_be_written():
    top = L.Input(shape={"dim": [1]})
    for _ in range(3000):
        top = L.Power(top)
    assert len(to_proto(top).layer) == 3001


def test_a_spec_becomes_a_net_that_runs():
    n = NetSpec()
    n.data = L.Input(shape={"dim": [2, 3]})
    n.ip = L.InnerProduct(n.data, num_output=4, weight_filler={"type": "constant", "value": 1})
    param = n.to_proto()
    param.state.CopyFrom(NetState(phase=TEST))
    net = Net.from_proto(param)
    out = net.forward(data=np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(out["ip"], np.full((2, 4), 3))


def coordinates(**settings):
    n = NetSpec()
    n.data = L.Input(shape={"dim": [2, 1, 100, 100]})
    n.conv = L.Convolution(n.data, num_output=2, **settings)
    n.pool = L.Pooling(n.conv, pool=P.Pooling.MAX, kernel_size=2, stride=2)
    n.up = L.Deconvolution(n.pool, convolution_param={"num_output": 2, "kernel_size": 4, "stride": 2, "pad": 0})
    return n


def test_coordinates_pass_through_layers_that_keep_positions():
    n = coordinates(kernel_size=3, pad=1)
    plain = coord_map.coord_map_from_to(n.up, n.data)
    n.relu = L.ReLU(n.up)
    n.crop = L.Crop(n.relu, n.data, axis=2, offset=[4])
    assert coord_map.coord_map_from_to(n.relu, n.data) == plain
    _, scale, shift = coord_map.coord_map_from_to(n.crop, n.data)
    assert (scale, shift) == (plain[1], plain[2] + 4)


def test_maps_of_several_axes_are_kept_apart():
    n = coordinates(kernel_size=[3, 5], stride=[1, 2], pad=[0, 10])
    _, scale, shift = coord_map.coord_map_from_to(n.up, n.data)
    alone = [coordinates(kernel_size=k, stride=s, pad=p) for k, s, p in ((3, 1, 0), (5, 2, 10))]
    for axis, other in enumerate(alone):
        _, one_scale, one_shift = coord_map.coord_map_from_to(other.up, other.data)
        assert (scale[axis], shift[axis]) == (one_scale[0], one_shift[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel_size": 3, "stride": 2}, "factor"),
        ({"kernel_size": 9, "pad": 0}, "negative"),
        ({"kernel_size": 4, "pad": 30}, "whole number"),
    ],
)
def test_tops_that_cannot_be_aligned_are_refused(settings, message):
    n = coordinates(**settings)
    with pytest.raises(AssertionError, match=message):
        coord_map.crop(n.up, n.data)


def test_unconnected_tops_have_no_map():
    n = coordinates(kernel_size=3)
    n.other = L.Input()
    n.dense = L.InnerProduct(n.up, num_output=3)
    for top in (n.other, n.dense):
        with pytest.raises(RuntimeError, match="no coordinate map"):
            coord_map.coord_map_from_to(top, n.data)
    with pytest.raises(coord_map.AxisMismatchException, match="axis 1 and axis 2"):
        coord_map.compose((1, 1.0, 0.0), (2, 1.0, 0.0))


def net_to_draw():
    n = NetSpec()
    n.data, n.label = L.Data(ntop=2, batch_size=7, source="db")
    n.conv = L.Convolution(n.data, num_output=20, kernel_h=3, kernel_w=5, param=[{"lr_mult": 0.5}])
    n.relu = L.ReLU(n.conv, in_place=True)
    n.pool = L.Pooling(n.relu, kernel_size=2, stride=3, pool=P.Pooling.AVE)
    n.acc = L.Accuracy(n.pool, n.label, include={"phase": TEST})
    net = n.to_proto()
    net.name = 'a "quoted" net'
    return net


def test_a_drawing_shows_layers_blobs_and_what_connects_them(tmp_path):
    draw.draw_net_to_file(net_to_draw(), tmp_path / "net.dot", "TB", display_lrm=True)
    text = (tmp_path / "net.dot").read_text()
    assert text.startswith('digraph "a \\"quoted\\" net" {\n  rankdir=TB;')
    assert 'label="conv (Convolution) kernel size: 3 x 5 stride: 1 pad: 0 lr mult: 0.5"' in text
    assert "(AVE Pooling) kernel size: 2 stride: 3 pad: 0" in text
    assert 'layer0 -> "blob data" [label="Batch 7"];' in text
    assert '"blob conv" -> layer2 [dir=both];' in text
    assert "Accuracy" in text
    assert "Accuracy" not in draw.dot_source(net_to_draw(), phase=TRAIN)


def test_pictures_need_graphviz(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"\.png needs the program 'dot'.*\.dot file"):
        draw.draw_net_to_file(net_to_draw(), tmp_path / "net.png")
    assert not (tmp_path / "net.png").exists()
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\n/bin/cat > /dev/null; echo picture $1")
    program.chmod(0o755)
    assert draw.draw_net(NetParameter(), ext="svg") == b"picture -Tsvg\n"
    program.write_text("#!/bin/sh\necho broken >&2; exit 1")
    with pytest.raises(ConfigError, match=r"dot could not draw \.png: broken"):
        draw.draw_net(net_to_draw())
