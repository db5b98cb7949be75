from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from poseidon.caffe import TEST, TRAIN, NativeLayer, Net, register, set_random_seed, weights
from poseidon.caffe.layers import registry
from poseidon.caffe.schema import NetParameter
from poseidon.caffe.schema.files import parse_text
from poseidon.errors import ConfigError

INPUT = """
layer { name: "data" type: "Input" top: "data" top: "label"
        input_param { shape { dim: 4 dim: 3 } shape { dim: 4 } } }
"""
TWO_LAYERS = (
    INPUT
    + """
layer { name: "a" type: "InnerProduct" bottom: "data" top: "a"
        inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "r" type: "ReLU" bottom: "a" top: "a" }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" param { lr_mult: 2 decay_mult: 0.5 }
        inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "b" bottom: "label" top: "loss" }
"""
)


def build(text, phase=TRAIN, **fields):
    param = parse_text(text, NetParameter)
    param.state.phase = phase
    for name, value in fields.items():
        setattr(param, name, value)
    return Net.from_proto(param)


def filled(net, seed=0):
    generator = np.random.default_rng(seed)
    net.blobs["data"].data[...] = generator.normal(size=net.blobs["data"].shape)
    net.blobs["label"].data[...] = generator.integers(0, 2, 4)
    return net


def run(net):
    net.clear_param_diffs()
    loss = net._forward(0, len(net.layers) - 1)
    net._backward(len(net.layers) - 1, 0)
    return loss


def test_gradients_are_those_of_pytorch():
    set_random_seed(3)
    net = filled(build(TWO_LAYERS))
    loss = run(net)
    params = [blob.data_tensor.clone().requires_grad_() for name in "ab" for blob in net.params[name]]
    data = torch.from_numpy(net.blobs["data"].data.copy())
    hidden = torch.relu(torch.nn.functional.linear(data, params[0], params[1]))
    scores = torch.nn.functional.linear(hidden, params[2], params[3])
    labels = torch.from_numpy(net.blobs["label"].data).long()
    expected = torch.nn.functional.cross_entropy(scores, labels)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    ours = [blob.diff for name in "ab" for blob in net.params[name]]
    for diff, param in zip(ours, params, strict=True):
        np.testing.assert_allclose(diff, param.grad.numpy(), rtol=1e-5, atol=1e-7)


def test_held_views_change_no_result():
    set_random_seed(3)
    plain, viewed = filled(build(TWO_LAYERS)), filled(build(TWO_LAYERS))
    viewed.share_with(plain)
    run(viewed)
    held = {name: (blob.data, blob.diff) for name, blob in viewed.blobs.items()}
    for seed in (1, 2):
        assert run(filled(viewed, seed)) == run(filled(plain, seed))
        for name, (data, diff) in held.items():
            np.testing.assert_array_equal(data, plain.blobs[name].data)
            np.testing.assert_array_equal(diff, plain.blobs[name].diff)
        np.testing.assert_array_equal(viewed.params["a"][0].diff, plain.params["a"][0].diff)


def test_layers_that_no_gradient_needs_are_skipped():
    net = build(TWO_LAYERS)
    needs = {layer.name: (layer.needs_backward, layer.propagate_down) for layer in net.layers}
    assert needs == {
        "data": (False, []),
        "a": (True, [False]),
        "r": (True, [True]),
        "b": (True, [True]),
        "loss": (True, [True, False]),
    }
    deploy = build(TWO_LAYERS.split('layer { name: "loss"')[0], TEST)
    assert not any(layer.needs_backward for layer in deploy.layers)
    forced = build(TWO_LAYERS, force_backward=True)
    assert [layer.propagate_down for layer in forced.layers] == [[], [True], [True], [True], [True, False]]
    cut = build(TWO_LAYERS.replace('top: "b" param', 'top: "b" propagate_down: false param'))
    assert [layer.needs_backward for layer in cut.layers] == [False, False, False, True, True]


def test_learnable_parameters_know_their_multipliers_and_when_they_are_ready():
    shared = TWO_LAYERS.replace('top: "a"\n', 'top: "a" param { name: "w" }\n').replace(
        'layer { name: "loss"',
        'layer { name: "c" type: "InnerProduct" bottom: "data" top: "c" param { name: "w" lr_mult: 3 }'
        " inner_product_param { num_output: 5 } }\n"
        'layer { name: "s" type: "Silence" bottom: "c" }\nlayer { name: "loss"',
    )
    net = build(shared)
    assert [(p.display_name, p.lr_mult, p.decay_mult) for p in net.learnable] == [
        ("w", 3, 1),
        ("1", 1, 1),
        ("0", 2, 0.5),
        ("1", 1, 1),
        ("1", 1, 1),
    ]
    weight = net.learnable[0]
    assert net.layers[weight.ready_layer].name == "a"
    assert len(weight.users) == 2
    net.params["c"][0].data[...] = 4
    assert (net.params["a"][0].data == 4).all()


def test_callbacks_run_around_each_layer_in_order():
    net = filled(build(TWO_LAYERS))
    seen = []
    for name in ("before_forward", "after_forward", "before_backward", "after_backward"):
        getattr(net, name)(lambda layer, name=name: seen.append((name, layer)))
    run(net)
    order = [0, 1, 2, 3, 4]
    assert seen[:10] == [(w, i) for i in order for w in ("before_forward", "after_forward")]
    assert seen[10:] == [(w, i) for i in reversed(order) for w in ("before_backward", "after_backward")]


@pytest.mark.parametrize("is_transposed", [False, True])
def test_inner_product_hands_over_factors_instead_of_its_weight_gradient(is_transposed):
    text = TWO_LAYERS.replace("num_output: 5", f"num_output: 5 transpose: {str(is_transposed).lower()}")
    net = filled(build(text))
    run(net)
    expected = net.params["a"][0].diff.copy()
    factors = []
    net.layer_dict["a"].factor_sink = lambda top_diff, bottom: factors.append((top_diff, bottom))
    run(net)
    assert not net.params["a"][0].has_diff
    ((top_diff, bottom),) = factors
    product = top_diff.t() @ bottom
    np.testing.assert_allclose((product.t() if is_transposed else product).numpy(), expected, rtol=1e-6)


def test_forward_and_backward_by_name_and_in_batches():
    net = build(TWO_LAYERS.split('layer { name: "loss"')[0], TEST, force_backward=True)
    rows = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    everything = net.forward_all(data=rows, label=np.zeros(10))
    assert everything["b"].shape == (10, 2)
    out = net.forward(data=rows[:4], label=np.zeros(4), blobs=["a"])
    np.testing.assert_array_equal(out["b"], everything["b"][:4])
    net.forward(start="b", end="b")
    np.testing.assert_array_equal(net.blobs["b"].data, everything["b"][:4])
    diffs = net.backward(diffs=["a"], b=np.ones((4, 2)), label=np.zeros(4))
    assert set(diffs) == {"data", "label", "a"}
    with pytest.raises(ConfigError, match="no layer 'nope'"):
        net.forward(end="nope")


def test_weights_survive_both_file_forms(tmp_path):
    net = build(TWO_LAYERS)
    net.save(tmp_path / "w.caffemodel")
    net.save_hdf5(tmp_path / "w.h5")
    for file in ("w.caffemodel", "w.h5"):
        other = build(TWO_LAYERS)
        other.copy_from(tmp_path / file)
        for name in "ab":
            for ours, theirs in zip(other.params[name], net.params[name], strict=True):
                np.testing.assert_array_equal(ours.data, theirs.data)
    wider = build(TWO_LAYERS.replace("num_output: 5", "num_output: 6"))
    for file in ("w.caffemodel", "w.h5"):
        with pytest.raises(ConfigError, match=r"'a'.*parameter 0.*\(5, 3\).*\(6, 3\)"):
            weights.load(wider, tmp_path / file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('type: "ReLU"', 'type: "RelU"'), r"'r' has unknown type 'RelU'; did you mean 'ReLU'.*Softmax"),
        (('bottom: "a" top: "b"', 'bottom: "x" top: "b"'), r"'b' \(InnerProduct\).*'x'.*no earlier.*data"),
        (('bottom: "a" top: "a" }', 'bottom: "a" top: "data" }'), r"'r' \(ReLU\).*'data'.*already"),
        (('bottom: "b" bottom: "label"', 'bottom: "b" bottom: "data"'), r"split_1' of shape \(4, 3\).*'b'.*\(4, 2\)"),
        (('bottom: "b" bottom: "label"', 'bottom: "b"'), r"'loss'.*exactly 2 bottom.*1 given"),
        (('"xavier"', '"xaver"'), r"layer 'a'.*'xaver'.*xavier"),
        (("num_output: 2", "num_output: 0"), r"'b'.*num_output"),
        (("lr_mult: 2", "lr_mult: 2 } param { } param {"), r"'b'.*2 parameters but 3 param"),
    ],
)
def test_mistakes_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        build(TWO_LAYERS.replace(*change))


def test_a_file_with_a_mistake_is_named(tmp_path):
    (tmp_path / "net.prototxt").write_text(TWO_LAYERS.replace('"ReLU"', '"Relu6"'))
    with pytest.raises(ConfigError, match=r"net\.prototxt: layer 'r'"):
        Net(str(tmp_path / "net.prototxt"), TRAIN)


def test_a_changed_input_shape_that_weights_cannot_take_is_an_error():
    net = filled(build(TWO_LAYERS))
    net.blobs["data"].reshape(4, 7)
    with pytest.raises(ConfigError, match=r"'a'.*'data' has shape \(4, 7\).*\(5, 3\)"):
        net._forward(0, len(net.layers) - 1)


def test_labels_out_of_range_are_an_error():
    net = filled(build(TWO_LAYERS))
    net.blobs["label"].data[...] = 2
    with pytest.raises(ConfigError, match=r"'label' run from 2 to 2.*classes 0 to 1"):
        net._forward(0, len(net.layers) - 1)


def test_debug_info_logs_every_layer(caplog):
    caplog.set_level(logging.INFO, "poseidon.caffe")
    run(filled(build(TWO_LAYERS, debug_info=True)))
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("    [Forward] Layer a, top blob a data: ") for line in lines)
    assert any(line.startswith("    [Backward] Layer b, param blob 0 diff: ") for line in lines)
    assert any(line.startswith("    [Backward] All net params (data, diff): L1 norm = (") for line in lines)
    assert "Top shape: 4 5 (20)" in lines
    assert "Memory required for data: 260" in lines


def test_a_registered_layer_computes_and_learns(monkeypatch):
    monkeypatch.setattr(registry, "_TYPES", dict(registry._TYPES))

    @register("Stretch")
    class Stretch(NativeLayer):
        def setup(self, *_blobs):
            self.make_param(0, (1,))

        def compute(self, inputs, params):
            return (inputs[0] * (1 + params[0]),)

    net = filled(build(TWO_LAYERS.replace('type: "ReLU"', 'type: "Stretch"')))
    run(net)
    # The in-place layer has scaled by one, so its input is its output.
    expected = (net.blobs["a"].data * net.blobs["a"].diff).sum()
    assert net.params["r"][0].diff[0] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match="already registered"):
        register("Stretch")(Stretch)


@pytest.mark.parametrize("text", ["", 'name: "n"', "# layer"])
def test_a_net_without_layers_says_so(text):
    net = build(text)
    for use in (net.forward, net.backward, lambda: run(net)):
        with pytest.raises(ConfigError, match=r"net '.?' has no layers"):
            use()
