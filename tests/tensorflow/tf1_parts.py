"""What ranks do for ``test_tf1_parts.py``: small graphs, each for one thing that ``--auto`` must see to."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from test_tf1_exact import follow

from poseidon.engine.outside import OutsideFrontEnd
from poseidon.errors import PoseidonError
from poseidon.following.options import AutoOptions
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.tensorflow.batch_moments import VARIABLE, is_asked_for
from poseidon.tensorflow.datasets import Datasets
from poseidon.tensorflow.tagged import TaggedSums
from poseidon.tensorflow.waiting import Run, WaitingCalls

v1 = tf.compat.v1


def line(rows: int | None = None, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Return placeholders, a variable and the loss of a straight line."""
    x, y = v1.placeholder(tf.float64, [rows, 3], "x"), v1.placeholder(tf.float64, [rows], "y")
    weights = v1.get_variable("weights", initializer=np.random.default_rng(seed).normal(size=(3, 1)))
    return x, y, weights, tf.reduce_mean(tf.square(tf.squeeze(tf.matmul(x, weights), 1) - y))


def batch(rows: int = 6) -> tuple[Any, Any]:
    generator = np.random.default_rng(5)
    return generator.normal(size=(rows, 3)), generator.normal(size=rows)


def message_of(action: Callable[[], Any]) -> str:
    """Return the error that an action ends with."""
    try:
        with tf.Graph().as_default():
            action()
    except PoseidonError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_graphs() -> None:
    shape = [4, 1 + int(os.environ["RANK"])]
    loss = tf.reduce_sum(v1.get_variable("odd", shape, tf.float64))
    v1.train.GradientDescentOptimizer(0.1).minimize(loss)


def inside_strategy() -> None:
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        v1.train.GradientDescentOptimizer(0.1).compute_gradients(line()[3])


def sync_replicas() -> None:
    v1.train.SyncReplicasOptimizer(v1.train.GradientDescentOptimizer(0.1), 2)


def own_server() -> None:
    v1.train.Server({"worker": ["127.0.0.1:1"]}, start=False)


def eager_v1() -> None:
    with tf.init_scope():
        variable = tf.Variable(1.0)
        v1.train.GradientDescentOptimizer(0.1).minimize(lambda: variable * 2.0, var_list=[variable])


def unknown_shape() -> None:
    variable = v1.get_variable("any", initializer=v1.placeholder(tf.float64, None), validate_shape=False)
    v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(variable))


def unknown_choice() -> None:
    os.environ[VARIABLE] = "yes"
    is_asked_for()


def refused() -> dict[str, str]:
    actions = (other_graphs, inside_strategy, sync_replicas, own_server, eager_v1, unknown_shape)
    return {action.__name__: message_of(action) for action in actions}


def fixed_rows(said: Any) -> tuple[float, float, str]:
    """Train where placeholders have a fixed length: everybody computes everything."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, y, weights, loss = line(6)
        step = v1.train.GradientDescentOptimizer(0.125).minimize(loss)
        session.run(v1.global_variables_initializer())
        inputs, labels = batch()
        start = session.run(weights)
        session.run(step, {x: inputs, y: labels})
        expected = start - 0.125 * (2 / 6) * inputs.T @ (inputs @ start - labels[:, None])
        return float(np.abs(session.run(weights) - expected).max()), float(start.sum()), said.getvalue()


def fetched() -> tuple[list[float], float]:
    """Fetch rows, a mean and a count beside a step: they are those of the whole batch."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, y, weights, loss = line()
        rows = tf.squeeze(tf.matmul(x, weights), 1)
        step = v1.train.AdamOptimizer(0.0).minimize(loss)
        session.run(v1.global_variables_initializer())
        inputs, labels = batch(7)
        _, found, mean, length = session.run([step, rows, loss, tf.shape(rows)[0]], {x: inputs, y: labels})
        expected = (inputs @ session.run(weights))[:, 0]
        return [float(np.abs(found - expected).max()), len(found), int(length)], float(
            mean - np.mean((expected - labels) ** 2)
        )


def by_hand() -> float:
    """Apply gradients that no tf.gradients made."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, y, weights, _ = line()
        gradient = tf.reduce_mean(x, 0)[:, None] * 1.0
        step = v1.train.GradientDescentOptimizer(1.0).apply_gradients([(gradient, weights)])
        session.run(v1.global_variables_initializer())
        inputs, labels = batch()
        start = session.run(weights)
        session.run(step, {x: inputs, y: labels})
        return float(np.abs(start - session.run(weights) - inputs.mean(0)[:, None]).max())


def overlap() -> bool:
    """Tell whether the top layer's gradient leaves while the bottom layer's is still to be computed.

    The bottom layer's backward waits for it, so it is no matter of time.
    """
    has_left = threading.Event()
    seen: list[bool] = []

    def wait(gradient: Any) -> Any:
        seen.append(has_left.wait(60))
        return gradient

    @tf.custom_gradient
    def bottom(x: Any) -> Any:
        return tf.identity(x), lambda gradient: tf.ensure_shape(tf.numpy_function(wait, [gradient], x.dtype), x.shape)

    give = OutsideFrontEnd.give

    def noted(front: Any, position: int, gradient: Any) -> None:
        give(front, position, gradient)
        if position == 1:
            has_left.set()

    with tf.Graph().as_default(), mock.patch.object(OutsideFrontEnd, "give", noted):
        x, y, weights, _ = line()
        top = v1.get_variable("top", initializer=np.ones([1, 1]))
        output = tf.matmul(bottom(tf.matmul(x, weights)), top)
        step = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.square(output[:, 0] - y)))
        with v1.Session(config=v1.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=4)) as session:
            session.run(v1.global_variables_initializer())
            session.run(step, dict(zip((x, y), batch(), strict=True)))
    return seen == [True]


def scaled_rate(options: AutoOptions) -> float:
    """Return by how much a step of rate 1 moves what has gradient 1."""
    _, patches, _ = follow(options)
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("v", [], tf.float64, tf.zeros_initializer())
        step = v1.train.GradientDescentOptimizer(1.0).minimize(-variable)
        session.run(v1.global_variables_initializer())
        session.run(step)
        value = float(session.run(variable))
    patches.undo()
    return value


def moving_averages(rank: int) -> tuple[float, float]:
    """Keep an average of what is in the batches. Return it after a restore, and what it should be."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, y, _, loss = line()
        average = v1.get_variable("average", [], tf.float64, tf.zeros_initializer(), trainable=False)
        with tf.control_dependencies([v1.assign(average, 0.5 * average + tf.reduce_mean(x))]):
            step = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run(v1.global_variables_initializer())
        inputs, labels = batch()
        for _ in range(3):
            session.run(step, {x: inputs, y: labels})
        expected = (1 + 0.5 + 0.25) * inputs.mean()
        saver = v1.train.Saver()
        path = saver.save(session, "./averages.ckpt", global_step=3)
        session.run(v1.assign(average, 100.0 + rank))
        saver.restore(session, path)
        return float(session.run(average)), float(expected)


def own_moments() -> float:
    """Return how far a batch's variance is from the mean of the workers' own, if nothing else is asked for."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, y, _, loss = line()
        variance = tf.reduce_sum(tf.nn.moments(x, [0])[1])
        kept = v1.get_variable("kept", [], tf.float64, tf.zeros_initializer(), trainable=False)
        with tf.control_dependencies([kept.assign(variance)]):
            step = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run(v1.global_variables_initializer())
        inputs, labels = batch()
        session.run(step, {x: inputs, y: labels})
        own = [part.var(0).sum() for part in (inputs[:3], inputs[3:])]
        return min(abs(float(session.run(kept)) - one) for one in (own[0], sum(own) / 2))


def normalized(size: int) -> list[float]:
    """Train on a dataset whose last batch is uneven, with moments of the batch; return what comes out."""
    with tf.Graph().as_default(), v1.Session() as session:
        samples = tf.data.Dataset.from_tensor_slices(np.random.default_rng(4).normal(size=(21, 3))).repeat(1)
        # Moments in a dataset's function are of one sample, wherever it is computed.
        samples = samples.map(lambda x: x - 0.1 * tf.nn.moments(x, [0])[0]).batch(size)
        x = v1.data.make_one_shot_iterator(samples).get_next()
        a, b = (v1.get_variable(name, initializer=np.array([0.5, -1.0, 2.0])) for name in "ab")
        z = a * x + b * tf.square(x)
        mean, variance = tf.nn.moments(z, [0])
        loss = tf.reduce_mean(tf.sin(tf.nn.batch_normalization(z, mean, variance, None, None, 0.1)))
        step = v1.train.GradientDescentOptimizer(0.5).minimize(loss)
        session.run(v1.global_variables_initializer())
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                session.run(step)
        return [float(value) for value in np.concatenate(session.run([a, b]))]


def calls_wait_for_each_other() -> bool:
    """Tell whether two calls can wait for each other where TensorFlow has a single thread."""
    calls, events = WaitingCalls(), [threading.Event(), threading.Event()]

    def function(mine: int) -> Callable[..., Any]:
        def meet(run: Run, one: Any, two: Any) -> Any:
            events[mine].set()
            return (one + run.weight, two) if events[1 - mine].wait(60) else (one, two)

        return meet

    config = v1.ConfigProto(use_per_session_threads=True, inter_op_parallelism_threads=1)
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        results = [calls.call(function(i), [tf.constant(5.0)] * 2, [tf.constant(0.0)] * 2) for i in range(2)]
        with calls.running(session, 0.5) as given:
            together = session.run(results, {reference.deref(): value for reference, value in given.items()})
        return together == [[5.5, 5.0]] * 2 and session.run(results) == [[0.0, 0.0]] * 2


def failed_call() -> str:
    """Return the error that is kept of a call that fails."""
    calls = WaitingCalls()

    def fail(*_: Any) -> Any:
        raise ValueError("a call that fails")

    with tf.Graph().as_default(), v1.Session() as session:
        results = calls.call(fail, [tf.constant(5.0)], [tf.constant(0.0)] * 2)
        with calls.running(session, 1.0) as given, contextlib.suppress(tf.errors.OutOfRangeError):
            session.run(results, {reference.deref(): value for reference, value in given.items()})
    return str(calls.error)


def run_after_failed_run(has_begun: bool) -> str:
    """Return what becomes of a run after one that failed, perhaps after it had made a call."""
    calls = WaitingCalls()
    with tf.Graph().as_default(), v1.Session() as session:
        items = v1.data.make_initializable_iterator(tf.data.Dataset.from_tensors(1.0))
        item = items.get_next()
        first = calls.call(lambda _, x: (x, x), [tf.constant(5.0)], [tf.constant(0.0)] * 2)[0]
        with tf.control_dependencies([first]):
            late = items.get_next()

        def run(fetched: Any) -> Any:
            with calls.running(session, 1.0) as given:
                return session.run(fetched, {reference.deref(): value for reference, value in given.items()})

        session.run(items.initializer)
        run([first, item])
        try:
            run(late if has_begun else item)
        except tf.errors.OutOfRangeError:
            session.run(items.initializer)
        return message_of(lambda: run([first, item]))


def epoch_after_noise() -> str:
    """Return the error of a second epoch, if the first ends when moments of noise have been exchanged already."""
    with v1.Session() as session:
        items = v1.data.make_initializable_iterator(tf.data.Dataset.range(4).repeat(1).batch(1))
        mean, variance = tf.nn.moments(tf.random.normal([5, 2]), [0])
        with tf.control_dependencies([mean]):
            item = tf.cast(items.get_next(), tf.float32)
        scale = v1.get_variable("scale", [2], tf.float32, tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(scale * (mean + variance) - tf.reduce_mean(item)))
        step = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run(v1.global_variables_initializer())

        def train(steps: int) -> None:
            session.run(items.initializer)
            for _ in range(steps):
                session.run(step)

        train(2)
        with contextlib.suppress(tf.errors.OutOfRangeError):
            session.run(step)
        return message_of(lambda: train(1))


def sums_of_other_runs(rank: int) -> str:
    """Return the error of a sum to which the workers come in different runs."""
    sums = TaggedSums(Team(None, 60.0))
    return message_of(lambda: sums.of(0, 7 + rank).sum(np.ones(2), "a test"))


def other_choices(rank: int) -> None:
    """Ask for moments over all workers on one worker only, and make some."""
    with mock.patch.dict(os.environ, {VARIABLE: str(rank)}):
        _, patches, _ = follow()
    try:
        tf.nn.moments(v1.placeholder(tf.float64, [None, 3]), [0])
    finally:
        patches.undo()


def sums_in_any_order(rank: int) -> list[float]:
    """Return sums of two tags, begun in opposite orders on the two workers."""
    sums, found = TaggedSums(Team(None, 60.0)), {}

    def add(tag: int) -> None:
        found[tag] = float(sums.of(tag, 1).sum(np.array([10.0**tag * (1 + rank)]), "a test")[0])

    threads = [threading.Thread(target=add, args=(tag,)) for tag in ((0, 1) if rank == 0 else (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


def counters(x: Any, y: Any, loss: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return variables that a step assigns from a batch in many ways, and the operations that do so."""

    def keep(name: str, dtype: Any = tf.float64) -> Any:
        return v1.get_variable(name, [], dtype, tf.zeros_initializer(), trainable=False)

    rows = tf.shape(x)[0]
    seen, steps, total = keep("seen", tf.int64), keep("steps", tf.int32), keep("total")
    largest, average, latest = keep("largest"), keep("average"), keep("latest")
    updates = [
        v1.assign_add(seen, tf.cast(rows, tf.int64)),
        v1.assign_add(steps, 1),
        v1.assign(total, total + tf.reduce_sum(y)),
        v1.assign(largest, tf.maximum(largest, tf.reduce_max(x))),
        v1.assign_sub(average, 0.1 * (average - tf.reduce_mean(x))),
        v1.assign(latest, loss),
    ]
    metrics = [
        v1.metrics.accuracy(y > 0, x[:, 0] > 0, name="accuracy"),
        v1.metrics.mean(loss, name="mean_of_scalars"),
        v1.metrics.mean(tf.abs(y), name="mean_of_rows"),
        v1.metrics.auc(y > 0, tf.sigmoid(x[:, 1]), num_thresholds=20),
        v1.metrics.true_positives(y > 0, x[:, 2] > 0),
    ]
    names = {v.op.name: v for v in (seen, steps, total, largest, average, latest)}
    local = {variable.op.name: variable for variable in v1.local_variables()}
    return {**names, **local}, [*updates, *(update for _, update in metrics)]


def counted(source: str, batch_size: int) -> dict[str, list[float]]:
    """Train three steps, each with many counters; return them, and what the last step has fetched of them."""
    generator = np.random.default_rng(6)
    data = generator.normal(size=(22, 3)), generator.normal(size=22)
    with tf.Graph().as_default(), v1.Session() as session:
        if source == "feeds":
            x, y, weights, loss = line()
        else:
            samples = tf.data.Dataset.from_tensor_slices(data).repeat(1).batch(batch_size)
            x, y = v1.data.make_one_shot_iterator(samples).get_next()
            weights = v1.get_variable("weights", initializer=np.random.default_rng(0).normal(size=(3, 1)))
            loss = tf.reduce_mean(tf.square(tf.squeeze(tf.matmul(x, weights), 1) - y))
        kept, updates = counters(x, y, loss)
        step = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        numbers = [loss, tf.reduce_sum(tf.cast(y > 0, tf.int32)), tf.reduce_sum(y)]
        for number in range(3):
            part = slice(number * batch_size, (number + 1) * batch_size)
            feeds = {x: data[0][part], y: data[1][part]} if source == "feeds" else {}
            fetched = session.run([step, *numbers, *updates], feeds)[1:]
        values = {name: np.ravel(value).tolist() for name, value in session.run(kept).items()}
        return {**values, "weights": np.ravel(session.run(weights)).tolist(), "fetched": [float(v) for v in fetched]}


def by_gradients_alone() -> tuple[list[float], list[float], str, str]:
    """Update with tf.gradients and assign_sub.

    Return the result, that after a restore of where it began, and errors where it cannot be averaged.
    """

    def train(is_late: bool = False, path: str = "") -> list[float]:
        with tf.Graph().as_default(), v1.Session() as session:
            x, y, weights, loss = line(seed=9 if path else 0)
            if is_late:
                session.run(v1.global_variables_initializer())
            clipped = tf.clip_by_norm(tf.gradients(loss, [weights])[0], 0.5)
            step = v1.assign_sub(weights, 0.1 * clipped)
            if path:
                v1.train.Saver().restore(session, path)  # on worker 0 only, and the first run of this graph
            else:
                session.run(v1.global_variables_initializer())
            for _ in range(2):
                session.run(step, dict(zip((x, y), batch(7), strict=True)))
            values: list[float] = session.run(weights)[:, 0].tolist()
            return values

    def from_dataset() -> None:
        samples = tf.data.Dataset.from_tensor_slices(batch(8)[0]).repeat().batch(2)
        x = v1.data.make_one_shot_iterator(samples).get_next()
        weights = v1.get_variable("weights", initializer=np.zeros(3))
        step = v1.assign_sub(weights, tf.reduce_mean(x, 0))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(step)

    with tf.Graph().as_default(), v1.Session() as session:
        line()
        session.run(v1.global_variables_initializer())
        begun = v1.train.Saver().save(session, "./begun.ckpt", global_step=0)
    return train(), train(path=begun), message_of(lambda: train(is_late=True)), message_of(from_dataset)


def random_numbers() -> tuple[list[float], list[int]]:
    """Return noise in the graph, which is each worker's own, and the order of a dataset, which is the same."""
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(3)
        noise = tf.random.uniform([2])
        test_data = tf.data.Dataset.range(20).shuffle(20)
        items = v1.data.make_one_shot_iterator(test_data).get_next()
        order = [int(session.run(items)) for _ in range(10)]
        return [float(value) for value in session.run(noise)], order


def graph_dataset() -> list[list[int]]:
    """Return the batches that one worker gets of 22 samples in batches of 4, and train on them."""
    with tf.Graph().as_default(), v1.Session() as session:
        samples = tf.data.Dataset.range(22).shuffle(22, seed=1).map(lambda i: tf.cast(i, tf.float64)).batch(4)
        values = v1.data.make_one_shot_iterator(samples).get_next()
        total = v1.get_variable("total", [], tf.float64, tf.zeros_initializer())
        step = v1.train.GradientDescentOptimizer(1.0).minimize(-total * tf.reduce_mean(values))
        session.run(v1.global_variables_initializer())
        seen: list[list[int]] = []
        while True:
            try:
                seen.append([int(value) for value in session.run([step, values])[1]])
            except tf.errors.OutOfRangeError:
                return [*seen, [round(float(session.run(total)) * 1000)]]


def deal(rank: int, dataset: Any, **options: Any) -> list[Any]:
    """Return what a worker of two gets of a dataset, as lists."""
    dealt = Datasets(rank, 2, AutoOptions(**options), ScriptReport(False)).deal(dataset)
    return [tf.nest.map_structure(lambda part: part.numpy().tolist(), element) for element in dealt]


def eager_deals() -> dict[str, Any]:
    ten = tf.data.Dataset.range(10)
    repeated = ten.repeat(1)
    pairs = tf.data.Dataset.zip((ten, ten.map(lambda i: -i))).repeat(1)
    padded = ten.repeat(1).map(lambda i: tf.fill([i % 3 + 1], i)).padded_batch(2)
    test_set = ten.shuffle(10).batch(3)
    full = Datasets(0, 2, AutoOptions(), ScriptReport(False)).deal(repeated.batch(2, drop_remainder=True))
    return {
        "per-worker": [deal(rank, pairs.batch(3)) for rank in range(2)],
        "total": [deal(rank, repeated.batch(3), batch="total") for rank in range(2)],
        "full": [full.element_spec.shape.as_list(), [part.numpy().tolist() for part in full]],
        "turns": [deal(rank, padded) for rank in range(2)],
        "single": [deal(rank, repeated) for rank in range(2)],
        "whole": [deal(rank, ten.batch(4)) for rank in range(2)],
        "test": [sorted(value for part in deal(rank, test_set) for value in part) for rank in range(2)],
    }


def check_all(folder: str) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    os.chdir(folder)
    deals = eager_deals() if rank == 0 else None
    alone = normalized(8) if rank == 0 else None
    counted_alone = {"feeds": counted("feeds", 8), "dataset": counted("dataset", 8)}
    by_hand_alone = by_gradients_alone()[0]
    following, patches, said = follow()
    results: dict[str, Any] = {
        "deals": deals,
        "refused": refused(),
        "fixed": fixed_rows(said),
        "fetched": fetched(),
        "by hand": by_hand(),
        "overlap": overlap(),
        "averages": moving_averages(rank),
        "own moments": own_moments(),
        "calls": (calls_wait_for_each_other(), failed_call()),
        "failed runs": (run_after_failed_run(False), run_after_failed_run(True)),
        "sums": (sums_in_any_order(rank), sums_of_other_runs(rank)),
        "random": random_numbers(),
        "graph dataset": graph_dataset(),
        "counted": ({"feeds": counted("feeds", 8), "dataset": counted("dataset", 4)}, counted_alone),
        "by gradients alone": (*by_gradients_alone(), by_hand_alone),
    }
    following.conclude()
    patches.undo()
    results["rate"] = scaled_rate(AutoOptions(scale_lr=True))
    results["refused"]["other_choices"] = message_of(lambda: other_choices(rank))
    results["refused"]["unknown_choice"] = message_of(unknown_choice)
    os.environ[VARIABLE] = "1"
    _, patches, _ = follow()
    results["normalized"] = (normalized(4), alone)
    with tf.Graph().as_default():
        results["failed runs"] += (epoch_after_noise(),)
    patches.undo()
    sys.stderr = sys.__stderr__
    return {**results, "files": sorted(path.name for path in Path().iterdir()), "said": said.getvalue()}
