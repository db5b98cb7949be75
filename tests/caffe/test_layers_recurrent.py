"""LSTM, RNN and LSTMUnit against PyTorch's, with states that cross passes and streams that restart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from one_layer import backward, build, forward

from poseidon.errors import ConfigError

rng = np.random.default_rng(3)
STEPS, STREAMS, INPUTS, UNITS = 4, 2, 3, 5


def recurrent(kind, shapes, tops=("top",), settings=""):
    net = build(f'type: "{kind}" recurrent_param {{ num_output: {UNITS} {settings} }}', shapes, tops)
    for blob in net.params["subject"]:
        blob.data[...] = rng.normal(size=blob.shape) * 0.5
    return net


def torch_lstm(blobs):
    """PyTorch's gates stand in the order input, forget, candidate, output; ours: input, forget, output, candidate."""
    model = torch.nn.LSTM(blobs[0].shape[1], UNITS)

    def ordered(values):
        parts = torch.from_numpy(values.copy()).split(UNITS)
        return torch.cat([parts[0], parts[1], parts[3], parts[2]])

    with torch.no_grad():
        model.weight_ih_l0.copy_(ordered(blobs[0].data))
        model.bias_ih_l0.copy_(ordered(blobs[1].data))
        model.weight_hh_l0.copy_(ordered(blobs[2].data))
        model.bias_hh_l0.zero_()
    return model


def tensor(values):
    return torch.from_numpy(np.asarray(values, np.float32))


def test_lstm_is_pytorchs_on_unbroken_sequences():
    net = recurrent("LSTM", [(STEPS, STREAMS, INPUTS), (STEPS, STREAMS)])
    model = torch_lstm(net.params["subject"])
    values, cont = rng.normal(size=(STEPS, STREAMS, INPUTS)), np.ones((STEPS, STREAMS))
    x = tensor(values).requires_grad_()
    want, state = model(x)
    (top,) = forward(net, values, cont)
    np.testing.assert_allclose(top, want.detach(), rtol=1e-4, atol=1e-6)
    diff = rng.normal(size=top.shape)
    want.backward(tensor(diff))
    np.testing.assert_allclose(backward(net, diff)[0], x.grad, rtol=1e-4, atol=1e-6)
    # The next pass goes on from where this one ended, but its gradient stops there.
    x = tensor(values).requires_grad_()
    want, _ = model(x, tuple(part.detach() for part in state))
    (top,) = forward(net, values, cont)
    np.testing.assert_allclose(top, want.detach(), rtol=1e-4, atol=1e-6)
    want.backward(tensor(diff))
    np.testing.assert_allclose(backward(net, diff)[0], x.grad, rtol=1e-4, atol=1e-6)


def test_a_mark_of_zero_starts_a_stream_anew():
    net = recurrent("LSTM", [(STEPS, STREAMS, INPUTS), (STEPS, STREAMS)])
    model = torch_lstm(net.params["subject"])
    values, cont = rng.normal(size=(STEPS, STREAMS, INPUTS)), np.ones((STEPS, STREAMS))
    cont[2, 1] = 0
    (top,) = forward(net, values, cont)
    x = tensor(values)
    np.testing.assert_allclose(top[:, :1], model(x[:, :1])[0].detach(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(top[:2, 1:], model(x[:2, 1:])[0].detach(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(top[2:, 1:], model(x[2:, 1:])[0].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "states"), [("LSTM", 2), ("RNN", 1)])
def test_exposed_states_carry_a_sequence_over_two_passes(kind, states):
    shapes = [(2, STREAMS, INPUTS), (2, STREAMS)]
    names = ["top", "h", "c"][: 1 + states]
    state_shapes = [(1, STREAMS, UNITS)] * states
    exposed = recurrent(kind, shapes + state_shapes, names, "expose_hidden: true")
    plain = recurrent(kind, shapes)
    plain.share_with(exposed)
    values, cont = rng.normal(size=(2, 2, STREAMS, INPUTS)), np.ones((2, STREAMS))
    carried = [np.zeros(shape) for shape in state_shapes]
    for part in values:
        top, *carried = forward(exposed, part, cont, *carried)
        np.testing.assert_array_equal(top, forward(plain, part, cont)[0])
        assert [state.shape for state in carried] == state_shapes
    if kind == "LSTM":
        np.testing.assert_array_equal(carried[0][0], top[-1])


def test_a_static_input_acts_like_one_repeated_at_every_step():
    static_net = recurrent("RNN", [(STEPS, STREAMS, INPUTS), (STEPS, STREAMS), (STREAMS, 2)])
    joined_net = recurrent("RNN", [(STEPS, STREAMS, INPUTS + 2), (STEPS, STREAMS)])
    from_x, bias, from_static, *others = static_net.params["subject"]
    joined = joined_net.params["subject"]
    joined[0].data[...] = np.concatenate([from_x.data, from_static.data], axis=1)
    for target, source in zip(joined[1:], [bias, *others], strict=True):
        target.data[...] = source.data
    values, static = rng.normal(size=(STEPS, STREAMS, INPUTS)), rng.normal(size=(STREAMS, 2))
    cont = np.ones((STEPS, STREAMS))
    tiled = np.concatenate([values, np.broadcast_to(static, (STEPS, STREAMS, 2))], axis=2)
    np.testing.assert_allclose(
        forward(static_net, values, cont, static)[0], forward(joined_net, tiled, cont)[0], rtol=1e-4, atol=1e-6
    )


def test_another_number_of_streams_starts_from_nothing():
    net = recurrent("LSTM", [(STEPS, STREAMS, INPUTS), (STEPS, STREAMS)])
    values = rng.normal(size=(STEPS, 3, INPUTS))
    forward(net, values[:, :STREAMS], np.ones((STEPS, STREAMS)))
    net.blobs["b0"].reshape(STEPS, 3, INPUTS)
    net.blobs["b1"].reshape(STEPS, 3)
    want = torch_lstm(net.params["subject"])(tensor(values))[0].detach()
    np.testing.assert_allclose(forward(net, values, np.ones((STEPS, 3)))[0], want, rtol=1e-4, atol=1e-6)


def test_parameters_come_in_caffes_order():
    lstm = recurrent("LSTM", [(STEPS, STREAMS, 2, 3), (STEPS, STREAMS), (STREAMS, 7)])
    assert [blob.shape for blob in lstm.params["subject"]] == [(20, 6), (20,), (20, 7), (20, 5)]
    rnn = recurrent("RNN", [(STEPS, STREAMS, INPUTS), (STEPS, STREAMS), (STREAMS, 7)])
    assert [blob.shape for blob in rnn.params["subject"]] == [(5, 3), (5,), (5, 7), (5, 5), (5, 5), (5,)]


def test_fillers_are_told_weights_from_biases():
    fillers = 'weight_filler { type: "constant" value: 2 } bias_filler { type: "constant" value: 3 }'
    net = build(f'type: "RNN" recurrent_param {{ num_output: 2 {fillers} }}', [(1, 1, 2), (1, 1)])
    assert [float(blob.data.flat[0]) for blob in net.params["subject"]] == [2, 3, 2, 2, 3]


@pytest.mark.parametrize(("layer", "shapes", "tops", "message"), [
    ('type: "LSTM"', [(2, 2, 3), (2, 2)], "t", "num_output must be given"),
    ('type: "LSTM" recurrent_param { num_output: 2 }', [(2, 2), (2, 2)], "t", r"'b0' of shape \(2, 2\)"),
    ('type: "RNN" recurrent_param { num_output: 2 }', [(3, 2, 1), (2, 2)], "t",
     r"'b0' of shape \(3, 2, 1\) and 'b1' of shape \(2, 2\) must have"),
    ('type: "RNN" recurrent_param { num_output: 2 }', [(3, 2, 1), (3, 2), (3, 4)], "t",
     r"static input 'b2' of shape \(3, 4\)"),
    ('type: "LSTM" recurrent_param { num_output: 2 }', [(2, 2, 1), (2, 2), (2, 1), (2, 1)], "t",
     r"takes 2 bottom blobs \(or 3 with a static input\) and 1 top blob\(s\); 4 and 1 given"),
    ('type: "LSTM" recurrent_param { num_output: 2 expose_hidden: true }', [(2, 2, 1), (2, 2)], "t",
     "takes 4 bottom blobs"),
    ('type: "RNN" recurrent_param { num_output: 2 expose_hidden: true }', [(2, 2, 1), (2, 2), (1, 2, 3)], "t u",
     r"state 'b2' has shape \(1, 2, 3\), expected \(1, 2, 2\)"),
    ('type: "LSTMUnit"', [(1, 2, 3), (1, 2, 9), (1, 2)], "t u", r"'b1' of shape \(1, 2, 9\)"),
    ('type: "LSTMUnit"', [(2, 3), (1, 2, 9), (1, 2)], "t u", r"'b0' of shape \(2, 3\)"),
])  # fmt: skip
def test_bad_definitions_are_refused(layer, shapes, tops, message):
    with pytest.raises(ConfigError, match=message):
        build(layer, shapes, tops.split())


def test_the_number_of_steps_is_fixed():
    net = recurrent("RNN", [(STEPS, STREAMS, INPUTS), (STEPS, STREAMS)])
    net.blobs["b0"].reshape(2, STREAMS, INPUTS)
    net.blobs["b1"].reshape(2, STREAMS)
    with pytest.raises(ConfigError, match=r"'b0' changed from 4 steps to 2"):
        net.run_forward()
