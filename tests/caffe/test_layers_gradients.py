"""Gradients of the layers that are not vision's, against finite differences on random shapes."""

from __future__ import annotations

import numpy as np
import pytest
from gradcheck import check_gradients

from poseidon.caffe import TEST, TRAIN


def draw(*shape, seed=0, low=-2.0, high=2.0):
    return np.random.default_rng(seed + sum(shape)).uniform(low, high, shape)


def away_from(points, values, distance=0.02):
    """Push values off the kinks of a function, where no derivative exists."""
    for point in points:
        near = np.abs(values - point) < distance
        values = np.where(near, point + np.where(values < point, -distance, distance), values)
    return values


def classes(count, *shape, seed=5):
    return np.random.default_rng(seed).integers(0, count, shape).astype(float)


SHAPES = [(3,), (2, 5), (2, 3, 4), (1, 2, 3, 2)]

NEURONS = [
    ('type: "ReLU"', [0]),
    ('type: "ReLU" relu_param { negative_slope: 0.3 }', [0]),
    ('type: "Sigmoid"', []),
    ('type: "TanH"', []),
    ('type: "AbsVal"', [0]),
    ('type: "BNLL"', []),
    ('type: "Power" power_param { power: 3 scale: 0.5 shift: 0.2 }', []),
    ('type: "Power" power_param { power: 0 }', []),
    ('type: "Power" power_param { scale: 0 shift: 2 power: 2 }', []),
    ('type: "Exp"', []),
    ('type: "Exp" exp_param { base: 2 scale: 0.5 shift: 1 }', []),
    ('type: "Log" log_param { base: 10 scale: 0.5 shift: 4 }', []),
    ('type: "ELU" elu_param { alpha: 0.7 }', [0]),
    ('type: "Swish"', []),
    ('type: "Swish" swish_param { beta: 1.7 }', []),
    ('type: "Clip" clip_param { min: -0.8 max: 0.9 }', [-0.8, 0.9]),
    ('type: "Threshold" threshold_param { threshold: 0.1 }', [0.1]),
    ('type: "Dropout" dropout_param { dropout_ratio: 0.4 }', []),
]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("layer", "kinks"), NEURONS, ids=[layer for layer, _ in NEURONS])
def test_neurons(layer, kinks, in_place):
    for shape in SHAPES:
        check_gradients(layer, [away_from(kinks, draw(*shape))], in_place=in_place)


@pytest.mark.parametrize("phase", [TRAIN, TEST])
def test_dropout_in_both_phases(phase):
    check_gradients('type: "Dropout"', [draw(4, 5)], phase=phase)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shared", ["true", "false"])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 3, 2, 2)])
def test_prelu(shape, shared, in_place):
    values = away_from([0], draw(*shape))
    check_gradients(f'type: "PReLU" prelu_param {{ channel_shared: {shared} }}', [values], in_place=in_place)


@pytest.mark.parametrize("settings", ["", "bias_term: false", "transpose: true", "axis: 2", "axis: -1 transpose: true"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 2, 2, 2)])
def test_inner_product(shape, settings):
    check_gradients(f'type: "InnerProduct" inner_product_param {{ num_output: 3 {settings} }}', [draw(*shape)])


@pytest.mark.parametrize(("shape", "axis"), [((3, 4), 1), ((2, 3, 4), 1), ((2, 3, 4), -1), ((4, 2, 3, 2), 0)])
def test_softmax(shape, axis):
    check_gradients(f'type: "Softmax" softmax_param {{ axis: {axis} }}', [draw(*shape)])


NORMALIZATIONS = ["", "normalize: false", *(f"normalization: {n}" for n in ("FULL", "VALID", "BATCH_SIZE", "NONE"))]


@pytest.mark.parametrize("settings", [*NORMALIZATIONS, "ignore_label: 1 normalization: VALID", "ignore_label: 0"])
@pytest.mark.parametrize(("shape", "axis"), [((4, 3), 1), ((2, 4, 3), 1), ((2, 3, 4), -1)])
def test_softmax_loss(shape, axis, settings):
    labels = classes(3, *np.delete(shape, axis))
    layer = f'type: "SoftmaxWithLoss" softmax_param {{ axis: {axis} }} loss_param {{ {settings} }}'
    check_gradients(layer, [draw(*shape), labels], wrt=[0])


@pytest.mark.parametrize(
    "settings", [*NORMALIZATIONS[2:], "", "ignore_label: 1", "ignore_label: 0 normalization: FULL"]
)
@pytest.mark.parametrize(("shape", "axis"), [((4, 3), 1), ((2, 3, 2, 2), 1), ((2, 4, 3), 2)])
def test_infogain_loss(shape, axis, settings):
    labels = classes(3, *np.delete(shape, axis))
    layer = f'type: "InfogainLoss" infogain_loss_param {{ axis: {axis} }} loss_param {{ {settings} }}'
    check_gradients(layer, [draw(*shape), labels, draw(3, 3, low=0)], wrt=[0])


@pytest.mark.parametrize("settings", [*NORMALIZATIONS, "ignore_label: 1", "ignore_label: 0 normalization: VALID"])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 2)])
def test_sigmoid_cross_entropy_loss(shape, settings):
    layer = f'type: "SigmoidCrossEntropyLoss" loss_param {{ {settings} }}'
    check_gradients(layer, [draw(*shape), classes(2, *shape)], wrt=[0])


@pytest.mark.parametrize("norm", ["L1", "L2"])
@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3)])
def test_hinge_loss(shape, norm):
    values = away_from([-1, 1], draw(*shape))
    layer = f'type: "HingeLoss" hinge_loss_param {{ norm: {norm} }}'
    check_gradients(layer, [values, classes(np.prod(shape[1:]), shape[0])], wrt=[0])


@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 2)])
def test_multinomial_logistic_loss(shape):
    layer = 'type: "MultinomialLogisticLoss"'
    check_gradients(layer, [draw(*shape, low=0.1, high=1), classes(3, shape[0], 1)], wrt=[0])


@pytest.mark.parametrize("shapes", [((3,), (3,)), ((3, 4), (3, 4)), ((2, 6), (2, 3, 2))])
def test_euclidean_loss(shapes):
    check_gradients('type: "EuclideanLoss"', [draw(*shape, seed=i) for i, shape in enumerate(shapes)])


@pytest.mark.parametrize("settings", ["margin: 2.5", "margin: 9 legacy_version: true"])
@pytest.mark.parametrize("shape", [(6, 3), (5, 2, 1, 1)])
def test_contrastive_loss(shape, settings):
    bottoms = [draw(*shape, seed=1), draw(*shape, seed=2), classes(2, shape[0])]
    # Caffe's 1e-4 in the denominator makes its gradient differ from the true one by about that much.
    check_gradients(
        f'type: "ContrastiveLoss" contrastive_loss_param {{ {settings} }}', bottoms, wrt=[0, 1], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "coeff: 0.5 coeff: -2 coeff: 1",
        "operation: MAX",
        "operation: PROD",
        "operation: PROD stable_prod_grad: false",
    ],
)
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3, 2)])
def test_eltwise(shape, settings):
    bottoms = [away_from([0], draw(*shape, seed=i * 7)) for i in range(3)]
    check_gradients(f'type: "Eltwise" eltwise_param {{ {settings} }}', bottoms)


def test_eltwise_of_two():
    for operation in ("SUM", "PROD", "MAX"):
        layer = f'type: "Eltwise" eltwise_param {{ operation: {operation} }}'
        check_gradients(layer, [draw(2, 3, seed=1), draw(2, 3, seed=9)])


@pytest.mark.parametrize("operation", ["SUM", "ASUM", "SUMSQ", "MEAN"])
@pytest.mark.parametrize(("shape", "axis"), [((4,), 0), ((2, 3), 1), ((2, 3, 4), 1), ((2, 3, 4), -1), ((2, 3), 0)])
def test_reduction(shape, axis, operation):
    layer = f'type: "Reduction" reduction_param {{ operation: {operation} axis: {axis} coeff: 1.5 }}'
    check_gradients(layer, [away_from([0], draw(*shape))])


@pytest.mark.parametrize(("shapes", "settings"), [
    (((2, 3), (2, 1), (2, 2)), ""),
    (((1, 2, 3), (2, 2, 3)), "axis: 0"),
    (((2, 2, 3), (2, 2, 1)), "axis: -1"),
    (((2, 3, 2), (2, 1, 2)), "concat_dim: 1"),
    (((2, 3),), ""),
])  # fmt: skip
def test_concat(shapes, settings):
    bottoms = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    check_gradients(f'type: "Concat" concat_param {{ {settings} }}', bottoms)


@pytest.mark.parametrize(("shape", "tops", "settings"), [
    ((2, 6), 3, ""),
    ((4, 3, 2), 2, "axis: 0"),
    ((2, 5, 3), 3, "slice_point: 1 slice_point: 3"),
    ((2, 3, 4), 2, "axis: -1 slice_point: 1"),
    ((2, 4), 2, "slice_dim: 1"),
    ((2, 4), 1, ""),
])  # fmt: skip
def test_slice(shape, tops, settings):
    check_gradients(f'type: "Slice" slice_param {{ {settings} }}', [draw(*shape)], tops=tops)


def test_slice_whose_tops_are_not_all_used():
    check_gradients('type: "Slice"', [draw(2, 6)], tops=3, score=[1])


@pytest.mark.parametrize("layer", [
    'type: "Flatten"',
    'type: "Flatten" flatten_param { axis: 0 end_axis: -2 }',
    'type: "Reshape" reshape_param { shape { dim: 0 dim: -1 dim: 2 } }',
    'type: "Reshape" reshape_param { axis: 1 num_axes: 1 shape { dim: 1 dim: 3 } }',
    'type: "Tile" tile_param { tiles: 3 }',
    'type: "Tile" tile_param { tiles: 2 axis: -1 }',
    'type: "Tile" tile_param { tiles: 2 axis: 0 }',
])  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 2, 2)])
def test_arranging(layer, shape):
    check_gradients(layer, [draw(*shape)])


def test_batch_reindex():
    check_gradients('type: "BatchReindex"', [draw(3, 2, 2), np.array([2.0, 0, 0, 1, 2])], wrt=[0])
    check_gradients('type: "BatchReindex"', [draw(4, 3), np.array([1.0])], wrt=[0])


@pytest.mark.parametrize("settings", ["", "bias_term: false"])
def test_embed(settings):
    layer = f'type: "Embed" embed_param {{ num_output: 3 input_dim: 5 {settings} }}'
    check_gradients(layer, [classes(5, 4)], wrt=[])
    check_gradients(layer, [classes(5, 2, 3)], wrt=[])


@pytest.mark.parametrize("tops", [1, 2, 3])
def test_split(tops):
    check_gradients('type: "Split"', [draw(2, 3)], tops=tops)


@pytest.mark.parametrize("marks", [[1.0, 1.0], [0.0, 1.0]])
def test_lstm_unit(marks):
    check_gradients('type: "LSTMUnit"', [draw(1, 2, 3), draw(1, 2, 12), np.array([marks])], tops=2, wrt=[0, 1])


RECURRENT = [("LSTM", 2), ("RNN", 1)]


@pytest.mark.parametrize(("kind", "states"), RECURRENT)
@pytest.mark.parametrize("shape", [(3, 2, 4), (2, 3, 2, 2)])
def test_recurrent(kind, states, shape):
    # The first marks are zero, so a pass does not depend on the one before.
    cont = np.ones(shape[:2])
    cont[0] = 0
    cont[-1, -1] = 0
    check_gradients(f'type: "{kind}" recurrent_param {{ num_output: 3 }}', [draw(*shape), cont], wrt=[0])


@pytest.mark.parametrize(("kind", "states"), RECURRENT)
def test_recurrent_with_static_input(kind, states):
    bottoms = [draw(3, 2, 2), np.array([[0.0, 0], [1, 1], [1, 0]]), draw(2, 4)]
    check_gradients(f'type: "{kind}" recurrent_param {{ num_output: 2 }}', bottoms, wrt=[0, 2])


@pytest.mark.parametrize(("kind", "states"), RECURRENT)
def test_recurrent_with_exposed_states(kind, states):
    first = [draw(1, 2, 3, seed=i) for i in range(states)]
    layer = f'type: "{kind}" recurrent_param {{ num_output: 3 expose_hidden: true }}'
    bottoms = [draw(3, 2, 2), np.ones((3, 2)), draw(2, 4), *first]
    check_gradients(layer, bottoms, tops=1 + states, wrt=[0, 2], score=[0])
