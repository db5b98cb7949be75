"""Layers written by users: Python layers named in a prototxt, and registered types."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from one_layer import backward, build, forward

from poseidon.caffe import TRAIN, Net
from poseidon.caffe.layers import registry
from poseidon.caffe.schema import NetParameter
from poseidon.caffe.schema.files import parse_text
from poseidon.errors import ConfigError

MODULE = """
import caffe
import numpy as np


class Halve(caffe.Layer):
    def setup(self, bottom, top):
        if len(bottom) != 1:
            raise ValueError("one bottom")
        # Names that a layer of ours uses for itself belong to the user here.
        self.param, self.name, self.axis, self.loss, self.error = self.param_str, "mine", 3, 0.5, None
        self.seen = (self.phase, self.type)

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data / 2

    def backward(self, top, propagate_down, bottom):
        if propagate_down[0]:
            bottom[0].diff[...] = top[0].diff / 2


class Counter(caffe.Layer):
    def setup(self, bottom, top):
        self.count = 0
        top[0].reshape(1)

    def count_from(self, number):
        self.count = number

    def reshape(self, bottom, top):
        top[0].reshape(self.count + 1, 2)

    def forward(self, bottom, top):
        self.count += 1
        top[0].data[...] = self.count

    def backward(self, top, propagate_down, bottom):
        pass


class Distance(caffe.Layer):
    def setup(self, bottom, top):
        self.blobs.add_blob(3)

    def reshape(self, bottom, top):
        self.diff = np.zeros_like(bottom[0].data)
        top[0].reshape(1)

    def forward(self, bottom, top):
        self.diff[...] = bottom[0].data + self.blobs[0].data - bottom[1].data
        top[0].data[...] = np.sum(self.diff**2) / bottom[0].num / 2.0

    def backward(self, top, propagate_down, bottom):
        self.blobs[0].diff[...] += top[0].diff * self.diff.sum(axis=0) / bottom[0].num
        for i in range(2):
            if propagate_down[i]:
                bottom[i].diff[...] = (1, -1)[i] * top[0].diff * self.diff / bottom[i].num


class Stranger:
    pass
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch, caffe):
    (tmp_path / "own_layers.py").write_text(MODULE)
    (tmp_path / "broken_layers.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_layers", None)


def python(layer, module="own_layers", **fields):
    extra = " ".join(f'{name}: "{value}"' for name, value in fields.items())
    return f'type: "Python" python_param {{ module: "{module}" layer: "{layer}" {extra} }}'


def test_a_layer_works_on_live_arrays_and_keeps_its_own_attributes():
    net = build(python("Halve", param_str="text"), [(2, 3)], phase=TRAIN)
    values = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(forward(net, values)[0], values / 2)
    np.testing.assert_array_equal(backward(net, values)[0], values / 2)
    layer = net.layers[-1]
    assert layer.seen == (TRAIN, "Python")
    assert layer.user.param == "text"
    assert layer.name == "subject"
    assert layer.to_proto().python_param.param_str == "text"


def test_a_data_layer_shapes_its_top_in_every_pass_and_is_reached_through_the_net():
    net = build(python("Counter"))
    assert [forward(net)[0].shape for _ in range(2)] == [(1, 2), (2, 2)]
    net.layers[0].count_from(6)
    (top,) = forward(net)
    np.testing.assert_array_equal(top, np.full((7, 2), 7))
    with pytest.raises(AttributeError, match="no_such_thing"):
        net.layers[0].no_such_thing  # noqa: B018


def test_a_loss_layer_with_a_parameter_learns_like_ours(caffe):
    text = """
    layer { name: "x" type: "Input" top: "x" top: "y" input_param { shape { dim: 4 dim: 3 } } }
    layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param {
            num_output: 3 bias_term: BIAS weight_filler { type: "xavier" } } }
    layer { name: "loss" bottom: "ip" bottom: "y" top: "loss" loss_weight: 2 LOSS }
    """
    nets = []
    for bias, loss in (("false", python("Distance")), ("true", 'type: "EuclideanLoss"')):
        param = parse_text(text.replace("BIAS", bias).replace("LOSS", loss), NetParameter)
        param.state.phase = TRAIN
        nets.append(Net.from_proto(param))
    theirs, ours = nets
    rng = np.random.default_rng(0)
    theirs.params["ip"][0].data[...] = ours.params["ip"][0].data
    for _ in range(2):
        values = {name: rng.normal(size=(4, 3)) for name in "xy"}
        losses = []
        for net in nets:
            for name, value in values.items():
                net.blobs[name].data[...] = value
            losses.append(net.run_forward())
            net.run_backward()
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    np.testing.assert_allclose(theirs.params["ip"][0].diff, ours.params["ip"][0].diff, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(theirs.params["loss"][0].diff, ours.params["ip"][1].diff, rtol=1e-4, atol=1e-6)


def test_import_caffe_inside_a_module_means_this_package(monkeypatch, caffe):
    for name in [name for name in sys.modules if name == "caffe" or name.startswith("caffe.")]:
        monkeypatch.delitem(sys.modules, name)
    build(python("Halve"), [(2,)])
    assert sys.modules["caffe"] is caffe
    for name in [name for name in sys.modules if name == "caffe" or name.startswith("caffe.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(("layer", "message"), [
    (python("Halve", "missing_layers"), "module 'missing_layers' cannot be imported.*PYTHONPATH"),
    (python("Halve", "broken_layers"), "No module named 'a_module_that_is_missing'"),
    (python("Double"), "has no class 'Double'; its layers: Counter, Distance, Halve"),
    (python("Stranger"), "own_layers.Stranger does not derive from poseidon.caffe.Layer"),
])  # fmt: skip
def test_what_cannot_be_loaded_is_named(layer, message):
    with pytest.raises(ConfigError, match=rf"layer 'subject' \(Python\): .*{message}"):
        build(layer, [(2,)])


def test_a_users_error_comes_out_as_it_is():
    with pytest.raises(ValueError, match="one bottom"):
        build(python("Halve"), [(2,), (2,)])


GUIDE = Path(__file__).parents[2] / "docs" / "caffe-own-layers.md"


def guide_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def guide_net(text):
    inputs = 'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 2 } } }'
    net = Net.from_proto(parse_text("force_backward: true " + inputs + text, NetParameter))
    net.blobs["data"].data[...] = [[1, 2], [3, 4]]
    net.run_forward()
    net.tops_of(1)[0].diff[...] = 1
    net.run_backward()
    return net


def test_the_guides_python_layer_runs(tmp_path):
    (tmp_path / "own_layers.py").write_text(guide_blocks("python")[0])
    net = guide_net(guide_blocks("protobuf")[0])
    np.testing.assert_array_equal(net.blobs["half"].data, [[0.5, 1], [1.5, 2]])
    np.testing.assert_array_equal(net.blobs["data"].diff, np.full((2, 2), 0.5))


def test_the_guides_registered_layer_runs(monkeypatch):
    monkeypatch.setattr(registry, "_TYPES", dict(registry._TYPES))
    exec(guide_blocks("python")[1], {})
    net = guide_net(guide_blocks("protobuf")[1])
    np.testing.assert_array_equal(net.blobs["stretched"].data, [[2, 4], [6, 8]])
    np.testing.assert_array_equal(net.blobs["data"].diff, np.full((2, 2), 2))
    np.testing.assert_array_equal(net.params["stretch"][0].diff, [4, 6])
