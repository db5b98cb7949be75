"""Small models written as TensorFlow 1 scripts write them, and ten steps of each; runs inside ranks.

Everything is float64, where ten steps of different summation orders stay within 1e-9; a wrong weight or a missed row
shows at 1e-3. Only the fused batch normalisation knows no float64. Each model takes another way from gradients to
updates. No part of a batch has the statistics of the whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

STEPS = 10
BATCH = 13


class Model:
    """A graph with placeholders, a loss and a training operation."""

    def __init__(self, seed: int, dtype: Any = tf.float64) -> None:
        self._generator = np.random.default_rng(seed)
        self._dtype = dtype
        self.training = v1.placeholder_with_default(True, [])

    def variable(self, name: str, *shape: int, trainable: bool = True, around: float = 0.0) -> Any:
        start = self._generator.normal(around, shape[0] ** -0.5 if len(shape) > 1 else 0.1, size=shape)
        return v1.get_variable(name, initializer=tf.constant(start, self._dtype), trainable=trainable)

    def dense(self, x: Any, name: str, outputs: int) -> Any:
        weights = self.variable(f"{name}/weights", x.shape.as_list()[-1], outputs)
        return tf.matmul(x, weights) + self.variable(f"{name}/biases", outputs)


def loss_of(logits: Any, labels: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def mlp(model: Model, x: Any, labels: Any) -> tuple[Any, Any]:
    hidden = tf.nn.relu(model.dense(x, "one", 512))
    hidden = tf.nn.tanh(model.dense(hidden, "two", 96))
    loss = loss_of(model.dense(hidden, "three", 5), labels)
    with v1.variable_scope("one", reuse=True):
        loss += 0.01 * tf.nn.l2_loss(v1.get_variable("weights", dtype=tf.float64))
    optimizer = v1.train.MomentumOptimizer(0.05, 0.9)
    pairs = optimizer.compute_gradients(loss)
    clipped = [(tf.clip_by_norm(gradient, 0.5), variable) for gradient, variable in pairs]
    return loss, optimizer.apply_gradients(clipped, v1.train.get_or_create_global_step())


def normalize(model: Model, x: Any, name: str) -> Any:
    channels = x.shape.as_list()[-1]
    axes = list(range(len(x.shape.as_list()) - 1))
    mean, variance = tf.nn.moments(x, axes)
    averages = [model.variable(f"{name}/moving_{n}", channels, trainable=False) for n in ("mean", "variance")]
    keep_average(averages, (mean, variance), 0.9)
    scale, offset = model.variable(f"{name}/scale", channels), model.variable(f"{name}/offset", channels)
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)


def cnn(model: Model, x: Any, labels: Any) -> tuple[Any, Any]:
    x = tf.nn.conv2d(x, model.variable("conv1", 3, 3, 3, 8), 1, "SAME")
    x = tf.nn.relu(normalize(model, x, "bn1"))
    x = tf.nn.conv2d(x, model.variable("conv2", 3, 3, 8, 12), 1, "SAME")
    x = tf.nn.max_pool2d(tf.nn.relu(normalize(model, x, "bn2")), 2, 2, "SAME")
    loss = loss_of(model.dense(tf.reshape(x, [-1, 4 * 4 * 12]), "top", 6), labels)
    with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
        return loss, v1.train.GradientDescentOptimizer(0.05).minimize(loss)


def keep_average(averages: Sequence[Any], values: Sequence[Any], decay: Any) -> None:
    for average, value in zip(averages, values, strict=True):
        update = v1.assign_sub(average, (average - value) * (1 - tf.cast(decay, average.dtype)))
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)


def layer(model: Model, x: Any, name: str, is_fused: bool) -> Any:
    """Normalize as ``tf.layers.batch_normalization`` does it where ``training`` is a tensor."""
    channels, axes = x.shape.as_list()[-1], list(range(len(x.shape.as_list()) - 1))
    gamma, beta = model.variable(f"{name}/gamma", channels, around=1.0), model.variable(f"{name}/beta", channels)
    averages = [model.variable(f"{name}/moving_{n}", channels, trainable=False, around=1.0) for n in ("mean", "var")]

    def of_batch() -> Any:
        if is_fused:
            return v1.nn.fused_batch_norm(x, gamma, beta, epsilon=1e-3)
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        y = tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3)
        return y, tf.reshape(mean, [channels]), tf.reshape(variance, [channels])

    def of_averages() -> Any:
        y = tf.nn.batch_normalization(x, *averages, beta, gamma, 1e-3)
        return y, tf.identity(averages[0]), tf.identity(averages[1])

    y, *moments = tf.cond(model.training, of_batch, of_averages)
    keep_average(averages, moments, tf.where(model.training, 0.9, 1.0))
    y.set_shape(x.shape)
    return tf.nn.relu(y)


def branches(model: Model, x: Any, labels: Any, is_fused: bool) -> tuple[Any, Any]:
    """Build branches that a session may compute in any order, with a loss that sees them all."""
    parts = []
    for i in range(2):
        part = tf.nn.conv2d(x, model.variable(f"{i}/conv", 3, 3, 3, 4 + i), 1, "SAME")
        parts.append(layer(model, part, f"{i}/bn", is_fused))
    x = tf.nn.conv2d(tf.concat(parts, -1), model.variable("conv", 3, 3, 9, 8), 2, "SAME")
    x = tf.reshape(layer(model, x, "bn", is_fused), [-1, 4 * 4 * 8])
    x = layer(model, model.dense(x, "hidden", 10), "bn_hidden", False)
    loss = loss_of(model.dense(x, "top", 6), labels)
    with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
        return loss, v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss)


def layers(model: Model, x: Any, labels: Any) -> tuple[Any, Any]:
    v1.disable_control_flow_v2()  # branches as in TensorFlow 1; elsewhere they are functions
    try:
        return branches(model, x, labels, is_fused=False)
    finally:
        v1.enable_control_flow_v2()


def fused(model: Model, x: Any, labels: Any) -> tuple[Any, Any]:
    return branches(model, x, labels, is_fused=True)


def embedding(model: Model, x: Any, labels: Any) -> tuple[Any, Any]:
    table = model.variable("table", 5000, 16)
    offsets = model.variable("offsets", 5000)  # rows of a vector are single numbers
    words = tf.reduce_mean(tf.nn.embedding_lookup(table, x), 1)
    shift = tf.reduce_mean(tf.gather(offsets, x), 1, keepdims=True)
    loss = loss_of(model.dense(words + shift, "top", 4), labels)
    return loss, v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss)


def lstm(model: Model, x: Any, labels: Any) -> tuple[Any, Any]:
    units = 64
    kernel, bias = model.variable("kernel", 10 + units, 4 * units), model.variable("bias", 4 * units)
    state = output = tf.zeros([tf.shape(x)[0], units], x.dtype)
    for step in range(7):
        gates = tf.matmul(tf.concat([x[:, step], output], 1), kernel) + bias
        i, j, f, o = tf.split(gates, 4, 1)
        state = state * tf.sigmoid(f + 1) + tf.sigmoid(i) * tf.tanh(j)
        output = tf.tanh(state) * tf.sigmoid(o)
    loss = loss_of(model.dense(output, "top", 4), labels)
    variables = v1.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(v1.gradients(loss, variables), 0.3)
    return loss, v1.train.AdagradOptimizer(0.05).apply_gradients(zip(gradients, variables, strict=True))


def transformer(model: Model, x: Any, labels: Any) -> tuple[Any, Any]:
    width, heads = 16, 2
    x = tf.nn.embedding_lookup(model.variable("words", 50, width), x) + model.variable("places", 6, width)
    for layer in range(1):
        q, k, v = (_heads(_wide(model, x, f"{layer}/{name}", width), heads) for name in "qkv")
        weights = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / np.sqrt(width / heads))
        mixed = tf.reshape(tf.transpose(tf.matmul(weights, v), [0, 2, 1, 3]), [-1, 6, width])
        x = _layer_norm(model, x + _wide(model, mixed, f"{layer}/out", width), f"{layer}/norm1")
        hidden = tf.nn.gelu(_wide(model, x, f"{layer}/up", 64))
        x = _layer_norm(model, x + _wide(model, hidden, f"{layer}/down", width), f"{layer}/norm2")
    loss = loss_of(model.dense(tf.reduce_mean(x, 1), "top", 4), labels)
    return loss, v1.train.AdamOptimizer(0.01, epsilon=1e-3).minimize(loss)


def _wide(model: Model, x: Any, name: str, outputs: int) -> Any:
    length, inputs = x.shape.as_list()[1:]
    return tf.reshape(model.dense(tf.reshape(x, [-1, inputs]), name, outputs), [-1, length, outputs])


def _heads(x: Any, heads: int) -> Any:
    length, width = x.shape.as_list()[1:]
    return tf.transpose(tf.reshape(x, [-1, length, heads, width // heads]), [0, 2, 1, 3])


def _layer_norm(model: Model, x: Any, name: str) -> Any:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    width = x.shape.as_list()[-1]
    scale, offset = model.variable(f"{name}/scale", width), model.variable(f"{name}/offset", width)
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-6)


MODELS: dict[str, tuple[Callable[..., tuple[Any, Any]], tuple[int, ...], int]] = {
    "mlp": (mlp, (40,), 0),
    "cnn": (cnn, (8, 8, 3), 0),
    "layers": (layers, (8, 8, 3), 0),
    "fused": (fused, (8, 8, 3), 0),
    "embedding": (embedding, (9,), 5000),
    "lstm": (lstm, (7, 10), 0),
    "transformer": (transformer, (6,), 50),
}
"""How a model is built, the shape of its inputs, and the number of words if these are words."""


TOLERANCES = {"fused": 1e-5}
"""For variables and losses, where it is not 1e-9."""


def type_of(name: str) -> Any:
    return tf.float32 if name == "fused" else tf.float64


def batches(name: str) -> list[tuple[Any, Any]]:
    """Return the batches of ten steps, all uneven; the last one is too small for four workers."""
    _, shape, words = MODELS[name]
    generator = np.random.default_rng(7)
    found = []
    for step in range(STEPS):
        count = 3 if step == STEPS - 1 else BATCH
        x = generator.integers(0, words, (count, *shape)) if words else generator.normal(size=(count, *shape))
        found.append((x, generator.integers(0, 4, count)))
    return found


def train(name: str, seed: int = 3, is_first: bool = True) -> tuple[dict[str, Any], list[float]]:
    """Train in a graph and a session of its own; return all variables and the losses.

    At the end the first worker evaluates by itself, with the moving averages and with the moments of a batch.
    """
    build, shape, words = MODELS[name]
    # One thread: what blocks, blocks everything.
    config = v1.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=1)
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        x = v1.placeholder(tf.int32 if words else type_of(name), [None, *shape])
        labels = v1.placeholder(tf.int64, [None])
        model = Model(seed, type_of(name))
        loss, step = build(model, x, labels)
        session.run(v1.global_variables_initializer())
        losses = [float(session.run([step, loss], {x: inputs, labels: y})[1]) for inputs, y in batches(name)]
        for is_training in (False, True) if is_first else ():
            inputs, y = batches(name)[0]
            losses.append(float(session.run(loss, {x: inputs, labels: y, model.training: is_training})))
        variables = v1.global_variables()
        return {v.op.name: value for v, value in zip(variables, session.run(variables), strict=True)}, losses


def difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


def digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(values[name]).tobytes() for name in sorted(values))).hexdigest()
