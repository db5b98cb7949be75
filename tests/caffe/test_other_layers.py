"""What the layers that are not vision's do beyond the golden cases, and what they refuse."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from one_layer import apply, backward, build, forward

from poseidon.caffe import TEST, TRAIN, Net, layer_type_list, set_random_seed
from poseidon.caffe.blob import Blob
from poseidon.caffe.schema import NetParameter
from poseidon.caffe.schema.files import parse_text, write_binary
from poseidon.errors import ConfigError

rng = np.random.default_rng(11)


def net_of(text, phase=TEST):
    param = parse_text(text, NetParameter)
    param.state.phase = phase
    return Net.from_proto(param)


CAFFE_TYPES = """
AbsVal Accuracy ArgMax BNLL BatchNorm BatchReindex Bias Clip Concat ContrastiveLoss Convolution Crop Data Deconvolution
Dropout DummyData ELU Eltwise Embed EuclideanLoss Exp Filter Flatten HDF5Data HDF5Output HingeLoss Im2col ImageData
InfogainLoss InnerProduct Input LRN LSTM LSTMUnit Log MVN MemoryData MultinomialLogisticLoss PReLU Parameter Pooling
Power Python RNN ReLU Reduction Reshape SPP Scale Sigmoid SigmoidCrossEntropyLoss Silence Slice Softmax SoftmaxWithLoss
Split Swish TanH Threshold Tile WindowData
"""


def test_every_layer_type_of_caffe_is_there():
    assert layer_type_list() == sorted(CAFFE_TYPES.split())


# Accuracy and ArgMax.


def counted_accuracy(scores, labels, top_k, ignored):
    """Caffe's definition, place by place; scores are places x classes."""
    right, shown = np.zeros(scores.shape[1]), np.zeros(scores.shape[1])
    for row, label in zip(scores, labels.astype(int), strict=True):
        if label != ignored:
            shown[label] += 1
            right[label] += (row >= row[label]).sum() <= top_k
    return right.sum() / max(1, shown.sum()), right / np.maximum(1, shown)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("ignored", [None, 0, 255])
@pytest.mark.parametrize(("shape", "axis"), [((6, 4), 1), ((2, 4, 3), 1), ((3, 2, 4), -1), ((4, 5), 0)])
def test_accuracy_counts_by_place_and_class(shape, axis, ignored, top_k):
    scores = rng.integers(0, 4, shape).astype(float)  # many draws
    labels = rng.integers(0, 4, np.delete(shape, axis)).astype(float)
    if ignored == 255:
        labels.flat[::2] = 255
    settings = f"top_k: {top_k} axis: {axis}" + ("" if ignored is None else f" ignore_label: {ignored}")
    layer = f'type: "Accuracy" accuracy_param {{ {settings} }}'
    total, per_class = apply(layer, scores, labels, tops=("all", "each"))
    want, want_each = counted_accuracy(np.moveaxis(scores, axis, -1).reshape(-1, 4), labels.ravel(), top_k, ignored)
    assert total.shape == ()
    assert total == pytest.approx(want)
    np.testing.assert_allclose(per_class, want_each, rtol=1e-6)


def test_accuracy_of_nothing_is_zero():
    layer = 'type: "Accuracy" accuracy_param { ignore_label: 1 }'
    assert apply(layer, np.ones((2, 3)), [1, 1])[0] == 0


def test_argmax_prefers_the_last_of_equal_values():
    values = np.array([[1, 3, 3, 0], [2, 2, 2, 2]])
    np.testing.assert_array_equal(apply('type: "ArgMax"', values)[0], [[[2]], [[3]]])
    (top,) = apply('type: "ArgMax" argmax_param { top_k: 3 out_max_val: true }', values)
    np.testing.assert_array_equal(top, [[[2, 1, 0], [3, 3, 1]], [[3, 2, 1], [2, 2, 2]]])
    (top,) = apply('type: "ArgMax" argmax_param { axis: -1 top_k: 2 }', values)
    np.testing.assert_array_equal(top, [[2, 1], [3, 2]])


@pytest.mark.parametrize(("shape", "settings", "want"), [
    ((3, 2, 4, 5), "", (3, 1, 1, 1)),
    ((3, 2, 4, 5), "out_max_val: true top_k: 2", (3, 2, 2, 1)),
    ((3, 4), "", (3, 1, 1)),
    ((3, 4, 5), "axis: 1 top_k: 2", (3, 2, 5)),
])  # fmt: skip
def test_argmax_shapes(shape, settings, want):
    (top,) = apply(f'type: "ArgMax" argmax_param {{ {settings} }}', rng.normal(size=shape))
    assert top.shape == want


def test_argmax_along_an_axis_gives_values_or_places():
    values = rng.normal(size=(2, 5, 3))
    (places,) = apply('type: "ArgMax" argmax_param { axis: 1 }', values)
    (best,) = apply('type: "ArgMax" argmax_param { axis: 1 out_max_val: true }', values)
    np.testing.assert_array_equal(places[:, 0], values.argmax(1))
    np.testing.assert_allclose(best[:, 0], values.max(1), rtol=1e-6)


@pytest.mark.parametrize("layer", ['type: "Accuracy"', 'type: "ArgMax"'])
def test_layers_without_a_gradient_may_not_enter_an_objective(layer):
    bottoms = 'bottom: "x"' + (' bottom: "y"' if "Accuracy" in layer else "")
    net = net_of(
        'layer { name: "w" type: "Parameter" top: "x" parameter_param { shape { dim: 2 dim: 3 } } }'
        'layer { name: "y" type: "DummyData" top: "y" dummy_data_param { shape { dim: 2 } } }'
        f'layer {{ name: "a" top: "a" loss_weight: 1 {bottoms} {layer} }}'
    )
    net.run_forward()
    with pytest.raises(ConfigError, match=r"layer 'a' .*has no gradient"):
        net.run_backward()


# Layers that arrange.


@pytest.mark.parametrize(("shape", "settings", "want"), [
    ((2, 3, 4), "shape { dim: 0 dim: -1 }", (2, 12)),
    ((2, 3, 4), "shape { dim: -1 dim: 0 dim: 2 }", (4, 3, 2)),
    ((2, 8), "shape { dim: 0 dim: 2 dim: 2 dim: 2 }", (2, 2, 2, 2)),
    ((2, 8), "shape { dim: 2 dim: 2 dim: 2 } axis: 1", (2, 2, 2, 2)),
    ((2, 8), "shape { dim: 1 } axis: -1 num_axes: 0", (2, 8, 1)),
    ((2, 8), "shape { dim: 1 } axis: 1 num_axes: 0", (2, 1, 8)),
    ((2, 8), "shape { dim: 4 dim: 2 } axis: -2", (2, 4, 2)),
    ((2, 3, 4), "shape { dim: 3 dim: 2 } axis: 0 num_axes: 2", (3, 2, 4)),
    ((2, 1, 4), "shape { } axis: 1 num_axes: 1", (2, 4)),
])  # fmt: skip
def test_reshape_forms(shape, settings, want):
    values = rng.normal(size=shape).astype(np.float32)
    (top,) = apply(f'type: "Reshape" reshape_param {{ {settings} }}', values)
    np.testing.assert_array_equal(top, values.reshape(want))


@pytest.mark.parametrize(("settings", "want"), [
    ("", (2, 60)),
    ("axis: 0", (120,)),
    ("axis: 1 end_axis: 2", (2, 12, 5)),
    ("axis: -2 end_axis: -1", (2, 3, 20)),
    ("axis: 2 end_axis: 1", (2, 3, 1, 4, 5)),
])  # fmt: skip
def test_flatten_forms(settings, want):
    values = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
    (top,) = apply(f'type: "Flatten" flatten_param {{ {settings} }}', values)
    np.testing.assert_array_equal(top, values.reshape(want))


def test_slice_and_concat_undo_each_other():
    values = rng.normal(size=(2, 7, 3)).astype(np.float32)
    parts = apply('type: "Slice" slice_param { slice_point: 2 slice_point: 3 }', values, tops="abc")
    assert [part.shape[1] for part in parts] == [2, 1, 4]
    np.testing.assert_array_equal(apply('type: "Concat"', *parts)[0], values)
    old = apply('type: "Slice" slice_param { slice_dim: 2 }', values, tops="abc")
    np.testing.assert_array_equal(apply('type: "Concat" concat_param { concat_dim: 2 }', *old)[0], values)


def test_tile_repeats_along_its_axis():
    values = rng.normal(size=(2, 3)).astype(np.float32)
    (top,) = apply('type: "Tile" tile_param { axis: 0 tiles: 3 }', values)
    np.testing.assert_array_equal(top, np.tile(values, (3, 1)))


def test_a_changed_input_shape_flows_through():
    net = build('type: "Flatten"', [(2, 3, 4)])
    net.blobs["b0"].reshape(5, 2, 2)
    assert forward(net, np.ones((5, 2, 2)))[0].shape == (5, 4)


# Layers that choose rows.


def test_filter_follows_its_selector_in_every_pass():
    net = build('type: "Filter"', [(4, 2), (4, 1, 3), (4, 1)], tops=("x", "y"))
    assert net.blobs["x"].shape == (4, 2)
    x, y = rng.normal(size=(4, 2)).astype(np.float32), rng.normal(size=(4, 1, 3)).astype(np.float32)
    for selector in ([0, 1, -2, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 5]):
        kept = np.array(selector) != 0
        top_x, top_y = forward(net, x, y, np.array(selector)[:, None])
        np.testing.assert_array_equal(top_x, x[kept])
        np.testing.assert_array_equal(top_y, y[kept])
        diff = rng.normal(size=top_x.shape)
        bottom = backward(net, diff, np.ones_like(top_y))[0]
        want = np.zeros((4, 2))
        want[kept] = diff
        np.testing.assert_allclose(bottom, want, rtol=1e-6)


def test_batch_reindex_takes_an_empty_list():
    assert apply('type: "BatchReindex"', np.ones((3, 2)), np.zeros(0))[0].shape == (0, 2)


# Eltwise and Reduction.


def test_eltwise_maximum_breaks_ties_as_caffe_does():
    net = build('type: "Eltwise" eltwise_param { operation: MAX }', [(3,)] * 3)
    (top,) = forward(net, [1, 2, 0], [1, 1, 0], [1, 2, 3])
    np.testing.assert_array_equal(top, [1, 2, 3])
    np.testing.assert_array_equal(backward(net, [5, 6, 7]), [[0, 6, 0], [5, 0, 0], [0, 0, 7]])


def test_eltwise_products_divide_only_on_request():
    values = [[2.0, 0.0], [3.0, 5.0]]
    stable = build('type: "Eltwise" eltwise_param { operation: PROD }', [(2,)] * 2)
    forward(stable, *values)
    np.testing.assert_array_equal(backward(stable, [1, 1])[0], [3, 5])
    dividing = build('type: "Eltwise" eltwise_param { operation: PROD stable_prod_grad: false }', [(2,)] * 2)
    forward(dividing, *values)
    assert np.isnan(backward(dividing, [1, 1])[0][1])


def test_eltwise_sums_with_coefficients():
    a, b, c = rng.normal(size=(3, 2, 3))
    (top,) = apply('type: "Eltwise" eltwise_param { coeff: 0.5 coeff: 1 coeff: -3 }', a, b, c)
    np.testing.assert_allclose(top, 0.5 * a + b - 3 * c, rtol=1e-5)


@pytest.mark.parametrize(("operation", "reduce"), [
    ("SUM", np.sum),
    ("ASUM", lambda x, axis: np.abs(x).sum(axis)),
    ("SUMSQ", lambda x, axis: (x * x).sum(axis)),
    ("MEAN", np.mean),
])  # fmt: skip
def test_reduction_runs_over_all_axes_behind(operation, reduce):
    values = rng.normal(size=(2, 3, 4))
    settings = f"operation: {operation} axis: -2 coeff: 0.5"
    (top,) = apply(f'type: "Reduction" reduction_param {{ {settings} }}', values)
    np.testing.assert_allclose(top, 0.5 * reduce(values.reshape(2, 12), axis=1), rtol=1e-5)


# Losses.


def test_sigmoid_loss_divides_by_rows_unless_told_otherwise():
    scores, targets = np.zeros((2, 3)), np.ones((2, 3))
    for settings, divisor in (("", 2), ("normalize: true", 6), ("normalize: false", 2), ("normalization: NONE", 1)):
        (loss,) = apply(f'type: "SigmoidCrossEntropyLoss" loss_param {{ {settings} }}', scores, targets)
        assert loss == pytest.approx(6 * np.log(2) / divisor), settings


def test_sigmoid_loss_survives_large_scores():
    (loss,) = apply('type: "SigmoidCrossEntropyLoss"', [[1000.0, -1000.0]], [[1.0, 1.0]])
    assert loss == pytest.approx(1000)


def test_contrastive_loss_in_both_versions():
    left, right = np.array([[3.0, 4], [0, 1], [1, 1]]), np.zeros((3, 2))
    similar = [0, 0, 2]
    squared = np.array([25.0, 1, 2])
    (loss,) = apply('type: "ContrastiveLoss" contrastive_loss_param { margin: 2 }', left, right, similar)
    assert loss == pytest.approx((0 + (2 - 1) ** 2 + 2) / 6)
    legacy = 'type: "ContrastiveLoss" contrastive_loss_param { margin: 26 legacy_version: true }'
    (loss,) = apply(legacy, left, right, similar)
    assert loss == pytest.approx((26 - squared[0] + 26 - squared[1] + 2) / 6)


def test_contrastive_gradient_is_finite_where_the_distance_is_zero():
    net = build('type: "ContrastiveLoss"', [(2, 2), (2, 2), (2,)])
    forward(net, np.ones((2, 2)), np.ones((2, 2)), [0, 1])
    np.testing.assert_array_equal(backward(net, 1.0)[0], np.zeros((2, 2)))


def test_hinge_has_no_gradient_on_the_margin():
    net = build('type: "HingeLoss"', [(1, 3), (1,)])
    assert forward(net, [[1.0, -1.0, -0.5]], [0])[0] == pytest.approx(0.5)
    np.testing.assert_array_equal(backward(net, 2.0)[0], [[0, 0, 2]])


def infogain_by_hand(scores, labels, matrix, ignored):
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    rows = [-(matrix[int(label)] * log).sum() for label, log in zip(labels, logs, strict=True) if label != ignored]
    return sum(rows), len(rows)


@pytest.mark.parametrize("form", ["file", "bottom"])
@pytest.mark.parametrize("ignored", [None, 2])
def test_infogain_loss_reads_its_matrix(tmp_path, form, ignored):
    scores, labels = rng.normal(size=(5, 3)), np.array([0.0, 2, 1, 2, 0])
    matrix = rng.uniform(0, 1, (3, 3)).astype(np.float32)
    blob = Blob((1, 1, 3, 3))
    blob.data[...] = matrix
    write_binary(tmp_path / "H.binaryproto", blob.to_proto())
    extra = "" if ignored is None else f"loss_param {{ ignore_label: {ignored} }}"
    source = f'infogain_loss_param {{ source: "{tmp_path}/H.binaryproto" }}' if form == "file" else ""
    bottoms = [scores, labels] + ([] if form == "file" else [matrix])
    loss, shown = apply(f'type: "InfogainLoss" {source} {extra}', *bottoms, tops=("loss", "prob"))
    total, count = infogain_by_hand(scores, labels, matrix, ignored)
    assert loss == pytest.approx(total / count, rel=1e-5)
    np.testing.assert_allclose(shown, torch.softmax(torch.from_numpy(scores), 1), rtol=1e-5)


def test_a_loss_given_no_top_counts_all_the_same():
    net = build('type: "EuclideanLoss" loss_weight: 3', [(2, 2), (2, 2)], tops=())
    net.blobs["b0"].data[...] = 2
    assert net.run_forward() == pytest.approx(3 * 4 * 4 / 4)


# Dropout, PReLU, Parameter, DummyData, Embed, HDF5Output.


def test_dropout_draws_anew_in_every_pass_and_repeats_with_the_seed():
    net = build('type: "Dropout"', [(50, 40)], phase=TRAIN)
    ones = np.ones((50, 40))
    set_random_seed(4)
    first, second = forward(net, ones)[0], forward(net, ones)[0]
    assert set(np.unique(first)) == {0, 2}
    assert abs(first.mean() - 1) < 0.1
    assert (first != second).any()
    set_random_seed(4)
    np.testing.assert_array_equal(forward(net, ones)[0], first)
    np.testing.assert_array_equal(backward(net, ones)[0], first)


def test_dropout_in_place_keeps_its_mask_while_a_view_is_held():
    net = build('type: "Dropout" dropout_param { dropout_ratio: 0.3 }', [(6, 7)], tops=("b0",), phase=TRAIN)
    held = net.blobs["b0"].data
    forward(net, np.ones((6, 7)))
    kept = held.copy()
    np.testing.assert_allclose(np.unique(kept), [0, 1 / 0.7], rtol=1e-6)
    np.testing.assert_allclose(backward(net, np.ones((6, 7)))[0], kept, rtol=1e-6)


def test_prelu_takes_its_filler():
    net = build('type: "PReLU" prelu_param { filler { type: "constant" value: 0.1 } channel_shared: true }', [(1, 3)])
    assert net.params["subject"][0].shape == ()
    np.testing.assert_allclose(forward(net, [[-1.0, 0, 2]])[0], [[-0.1, 0, 2]], rtol=1e-6)


def test_a_parameter_layer_adds_up_its_gradients():
    net = net_of(
        'layer { name: "w" type: "Parameter" top: "w" parameter_param { shape { dim: 3 } } }'
        'layer { name: "sum" type: "Reduction" bottom: "w" top: "s" loss_weight: 2 }'
    )
    net.params["w"][0].data[...] = [1, 2, 3]
    assert net.run_forward() == 12
    net.run_backward()
    net.run_backward()
    np.testing.assert_array_equal(net.params["w"][0].diff, [4, 4, 4])
    np.testing.assert_array_equal(net.blobs["w"].diff, [2, 2, 2])


def test_dummy_data_fills_constants_once_and_the_rest_every_time():
    net = build(
        'type: "DummyData" dummy_data_param { num: 2 num: 3 channels: 1 height: 2 width: 4 '
        'data_filler { type: "constant" value: 7 } data_filler { type: "uniform" min: 1 max: 2 } }',
        tops=("c", "u"),
    )
    assert net.blobs["c"].shape == (2, 1, 2, 4)
    assert net.blobs["u"].shape == (3, 1, 2, 4)
    assert (net.blobs["c"].data == 7).all()
    assert (net.blobs["u"].data == 0).all()
    net.blobs["c"].data[...] = 5
    _, first = forward(net)
    _, second = forward(net)
    assert (net.blobs["c"].data == 5).all()
    assert first.min() >= 1
    assert (first != second).any()


def test_dummy_data_shares_one_shape_and_one_filler():
    settings = 'shape { dim: 2 dim: 3 } data_filler { type: "gaussian" std: 3 }'
    a, b = forward(build(f'type: "DummyData" dummy_data_param {{ {settings} }}', tops="ab"))
    assert a.shape == b.shape == (2, 3)
    assert (a != b).all()


EMBED = 'type: "Embed" embed_param { num_output: 2 input_dim: 5 weight_filler { type: "gaussian" std: 1 } '


def test_embed_hands_over_touched_rows_instead_of_its_table_gradient():
    net = build(EMBED + "}", [(2, 3)])
    rows, diff = np.array([[4, 0, 4], [1, 4, 0]]), rng.normal(size=(2, 3, 2))
    (top,) = forward(net, rows)
    table, bias = net.params["subject"]
    np.testing.assert_allclose(top, table.data[rows] + bias.data, rtol=1e-6)
    backward(net, diff)
    dense, bias_diff = table.diff.copy(), bias.diff.copy()
    given = []
    net.layers[-1].rows_sink = lambda numbers, gradients: given.append((numbers, gradients))
    backward(net, diff)
    ((numbers, gradients),) = given
    assert not table.has_diff
    np.testing.assert_array_equal(bias.diff, bias_diff)
    np.testing.assert_array_equal(numbers, rows.ravel())
    rebuilt = torch.zeros(5, 2).index_add_(0, numbers, gradients)
    np.testing.assert_allclose(rebuilt, dense, rtol=1e-6)
    assert (dense[[2, 3]] == 0).all()


def test_embed_gradients_add_up_until_cleared():
    net = build(EMBED + "bias_term: false }", [(3,)])
    forward(net, [1, 1, 2])
    for _ in range(2):
        net.blobs["top"].diff[...] = 1
        net.run_backward()
    assert len(net.params["subject"]) == 1
    np.testing.assert_array_equal(net.params["subject"][0].diff[:, 0], [0, 4, 2, 0, 0])


def test_hdf5_output_is_complete_after_each_pass(tmp_path):
    path = tmp_path / "out.h5"
    net = build(f'type: "HDF5Output" hdf5_output_param {{ file_name: "{path}" }}', [(2, 3), (2,)], tops=())
    with h5py.File(path) as file:
        assert list(file) == []
    for factor in (1, 2):
        forward(net, np.full((2, 3), factor), [factor, -factor])
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["data"][:, :, 0, 0], [[1] * 3] * 2 + [[2] * 3] * 2)
        np.testing.assert_array_equal(file["label"][()], np.reshape([1, -1, 2, -2], (4, 1, 1, 1)))


# What is refused, in one message that names the layer and what was seen.

REFUSED = [
    ('type: "Concat"', [(2, 3)], "top other", "exactly 1 top blob"),
    ('type: "Eltwise"', [(2, 3)], "top", "at least 2 bottom blob"),
    ('type: "Accuracy"', [(2, 3)], "top", "exactly 2 bottom blob"),
    ('type: "Silence"', [(2, 3)], "top", "exactly 0 top blob"),
    ('type: "LSTMUnit"', [(1, 2, 3), (1, 2, 12), (1, 2)], "top", "exactly 2 top blob"),
    ('type: "Filter"', [(2, 3), (2,)], "a b", "2 bottoms and 2 tops"),
    ('type: "Accuracy"', [(2, 3), (3,)], "top", r"'b1' of shape \(3,\).* 2 predictions in 'b0' of shape \(2, 3\)"),
    ('type: "Accuracy" accuracy_param { top_k: 4 }', [(2, 3), (2,)], "top", "top_k 4 exceeds the 3 classes"),
    ('type: "Accuracy" accuracy_param { axis: 2 }', [(2, 3), (2,)], "top", "axis 2 is out of range"),
    ('type: "ArgMax" argmax_param { top_k: 4 }', [(2, 3)], "top", r"top_k 4 .* 3 values .*'b0' of shape \(2, 3\)"),
    ('type: "ArgMax" argmax_param { axis: -3 }', [(2, 3)], "top", "axis -3 is out of range"),
    ('type: "Concat"', [(2, 3), (3, 3)], "top", r"'b0' of shape \(2, 3\) and 'b1' of shape \(3, 3\).* axis 1"),
    ('type: "Concat"', [(2, 3), (2, 3, 1)], "top", r"'b1' of shape \(2, 3, 1\)"),
    ('type: "Concat" concat_param { axis: 1 concat_dim: 1 }', [(2, 3), (2, 3)], "top", "both given"),
    ('type: "Concat" concat_param { concat_dim: 2 }', [(2, 3), (2, 3)], "top", "concat_dim 2 is out of range"),
    ('type: "Slice"', [(2, 3)], "a b", r"axis 1 of 'b0' of shape \(2, 3\) cannot be cut into 2 equal parts"),
    ('type: "Slice" slice_param { slice_point: 1 }', [(2, 3)], "a b c", r"3 tops need 2 slice_point\(s\), 1 given"),
    ('type: "Slice" slice_param { slice_point: 2 slice_point: 2 }', [(2, 3)], "a b c", r"\[2, 2\] must rise"),
    ('type: "Slice" slice_param { slice_point: 3 }', [(2, 3)], "a b", r"\[3\] must rise and lie inside axis 1"),
    ('type: "Slice" slice_param { slice_dim: 0 axis: 0 }', [(2, 3)], "a b", "both given"),
    ('type: "Flatten"', [(2, 3)], "b0", "cannot work in place"),
    ('type: "Flatten" flatten_param { axis: 2 end_axis: 0 }', [(2, 3, 4)], "top", "axis 2 lies after end_axis 0"),
    ('type: "Reshape" reshape_param { shape { dim: 7 } }', [(2, 3)], "top", r"'b0' of shape \(2, 3\) .*fit \(7,\)"),
    ('type: "Reshape" reshape_param { shape { dim: 4 dim: -1 } }', [(2, 3)], "top", r"does not fit \(4, -1\)"),
    ('type: "Reshape" reshape_param { shape { dim: -1 dim: -1 } }', [(2, 3)], "top", "may hold -1 once"),
    ('type: "Reshape" reshape_param { axis: 1 num_axes: 2 }', [(2, 3)], "top", "axis 1 with num_axes 2 is out of"),
    ('type: "Reshape" reshape_param { shape { dim: 6 dim: 1 dim: 0 } }', [(2, 3)], "top", "copies axis 2"),
    ('type: "Reshape" reshape_param { shape { dim: 6 } }', [(2, 3)], "b0", "cannot work in place"),
    ('type: "Tile"', [(2, 3)], "top", "tiles must be given and positive; it is 0"),
    ('type: "Tile" tile_param { tiles: 2 axis: 2 }', [(2, 3)], "top", "axis 2 is out of range"),
    ('type: "BatchReindex"', [(2, 3), (2, 1)], "top", r"'b1' of shape \(2, 1\)"),
    ('type: "Filter"', [(2, 3), (3,)], "top", r"'b0' of shape \(2, 3\) and selector 'b1' of shape \(3,\)"),
    ('type: "Filter"', [(2, 3), (2, 2)], "top", r"selector 'b1' of shape \(2, 2\) must hold one value per row"),
    ('type: "Eltwise"', [(2, 3), (2, 4)], "top", r"'b0' of shape \(2, 3\) and 'b1' of shape \(2, 4\)"),
    ('type: "Eltwise" eltwise_param { coeff: 1 }', [(2,), (2,)], "top", "1 for 2 bottoms"),
    ('type: "Eltwise" eltwise_param { operation: PROD coeff: 1 coeff: 2 }', [(2,), (2,)], "top", "not for products"),
    ('type: "Reduction" reduction_param { axis: 2 }', [(2, 3)], "top", "axis 2 is out of range"),
    ('type: "EuclideanLoss"', [(2, 3), (3, 2)], "top", r"'b0' of shape \(2, 3\) and 'b1' of shape \(3, 2\)"),
    ('type: "EuclideanLoss"', [(2, 3), (2, 4)], "top", r"'b1' of shape \(2, 4\) must hold the same number of values"),
    ('type: "SigmoidCrossEntropyLoss"', [(2, 3), (2, 4)], "top", r"shape \(2, 3\) and 'b1' of shape \(2, 4\)"),
    ('type: "HingeLoss"', [(2, 3), (2, 2)], "top", r"'b1' of shape \(2, 2\) must hold one label for each row"),
    ('type: "MultinomialLogisticLoss"', [(2, 3), (2, 2)], "top", r"one label for each row of 'b0' of shape \(2, 3\)"),
    ('type: "ContrastiveLoss"', [(2, 3), (2, 3), (3,)], "top", r"'b2' of shape \(3,\) .* row of 'b0' of shape"),
    ('type: "ContrastiveLoss"', [(2, 3, 2), (2, 3, 2), (2,)], "top", r"'b0' of shape \(2, 3, 2\) must hold one vector"),
    ('type: "InfogainLoss"', [(2, 3), (2,)], "top", "needs H"),
    ('type: "InfogainLoss"', [(2, 3), (2,), (2, 2)], "top", r"H of shape \(2, 2\) must be 3 x 3"),
    ('type: "InfogainLoss"', [(2, 3), (2, 2), (3, 3)], "top", r"'b1' of shape \(2, 2\) .* 2 predictions"),
    ('type: "InfogainLoss" loss_param { normalize: true }', [(2, 3), (2,), (3, 3)], "top", "use normalization"),
    ('type: "InfogainLoss" infogain_loss_param { source: "none" }', [(2, 3), (2,)], "top", "H cannot be read.*none"),
    ('type: "Dropout" dropout_param { dropout_ratio: 1 }', [(2, 3)], "top", "below 1; it is 1"),
    ('type: "PReLU"', [(3,)], "top", r"'b0' of shape \(3,\) must have at least 2 axes"),
    ('type: "DummyData"', [], "a", "needs shape once or once per top; 0 given for 1 tops"),
    ('type: "DummyData" dummy_data_param { num: 2 }', [], "a", "needs channels once or once per top; 0 given"),
    ('type: "DummyData" dummy_data_param { num: 2 shape { } }', [], "a", "both given"),
    ('type: "Embed" embed_param { num_output: 3 }', [(2,)], "top", "num_output and input_dim; they are 3 and 0"),
    ('type: "HDF5Output"', [(2, 3), (2,)], "", "file_name must be given"),
    ('type: "HDF5Output" hdf5_output_param { file_name: "/no/folder" }', [(2,), (2,)], "", "/no/folder"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "bottoms", "tops", "message"), REFUSED)
def test_bad_definitions_are_refused(layer, bottoms, tops, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(layer, bottoms, tops.split())
    kind = layer.split('"')[1]
    assert str(caught.value).startswith(f"layer 'subject' ({kind}): ")


@pytest.mark.parametrize(("layer", "values", "message"), [
    ('type: "Accuracy"', (np.ones((2, 3)), [0, 3]), "labels in 'b1' run from 0 to 3, allowed are 0 to 2"),
    ('type: "HingeLoss"', (np.ones((2, 3)), [-1, 2]), "labels in 'b1' run from -1 to 2, allowed are 0 to 2"),
    ('type: "MultinomialLogisticLoss"', (np.ones((2, 3)), [0, 9]), "labels in 'b1' run from 0 to 9"),
    ('type: "InfogainLoss"', (np.ones((2, 3)), [0, 3], np.ones((3, 3))), "labels in 'b1' run from 0 to 3"),
    ('type: "BatchReindex"', (np.ones((2, 3)), [0, 2]), "row numbers in 'b1' run from 0 to 2, allowed are 0 to 1"),
    ('type: "Embed" embed_param { num_output: 1 input_dim: 4 }', ([4.0],), "row numbers in 'b0' run from 4 to 4"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(layer, values, message):
    with pytest.raises(ConfigError, match=rf"layer 'subject' .*{message}"):
        apply(layer, *values)


@pytest.mark.parametrize(("layer", "shape", "others", "index"), [
    ('type: "HingeLoss"', (2,), [(2, 3)], 1),
    ('type: "SigmoidCrossEntropyLoss"', (2, 3), [(2, 3)], 1),
    ('type: "BatchReindex"', (2,), [(2, 3)], 1),
    ('type: "Filter" loss_weight: 1', (2,), [(2, 3)], 1),
    ('type: "ContrastiveLoss"', (2,), [(2, 3), (2, 3)], 2),
    ('type: "Embed" loss_weight: 1 embed_param { num_output: 1 input_dim: 2 }', (2,), [], 0),
])  # fmt: skip
def test_no_gradient_goes_to_labels_and_numbers(layer, shape, others, index):
    dims = " ".join(f"dim: {size}" for size in shape)
    inputs = "".join(
        f'layer {{ name: "b{i}" type: "Input" top: "b{i}" '
        f"input_param {{ shape {{ {' '.join(f'dim: {size}' for size in other)} }} }} }}"
        for i, other in enumerate(others)
    )
    ends = "".join(f'bottom: "b{i}" ' for i in range(len(others)))
    extra = "" if "loss_weight" in layer or "Loss" in layer else "loss_weight: 1"
    net = net_of(
        inputs + f'layer {{ name: "w" type: "Parameter" top: "w" parameter_param {{ shape {{ {dims} }} }} }}'
        f'layer {{ name: "subject" {ends} bottom: "w" top: "top" {layer} {extra} }}'
    )
    net.run_forward()
    with pytest.raises(ConfigError, match=rf"layer 'subject' .*cannot backpropagate to the .* in 'w'.* bottom {index}"):
        net.run_backward()


def test_rows_of_another_shape_cannot_be_appended(tmp_path):
    layer = f'type: "HDF5Output" hdf5_output_param {{ file_name: "{tmp_path}/out.h5" }}'
    net = build(layer, [(2, 3), (2,)], tops=())
    net.run_forward()
    net.blobs["b0"].reshape(2, 4)
    with pytest.raises(ConfigError, match=r"rows of shape \(3, 1, 1\); rows of shape \(4, 1, 1\)"):
        net.run_forward()


def test_prelu_refuses_other_channels_later():
    net = build('type: "PReLU"', [(2, 3)])
    net.blobs["b0"].reshape(2, 4)
    with pytest.raises(ConfigError, match=r"'b0' of shape \(2, 4\) has 4 channels; the slopes have shape \(3,\)"):
        net.run_forward()
