"""Batch normalisation of TensorFlow 1 graphs over the rows of all workers, wherever a script computes its moments.

Layers and hand-written code compute them by two functions, ``tf.nn.moments`` and ``fused_batch_norm``, which are
replaced here. Moments are a batch's if they run over the first axis of a tensor that depends on more than variables.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import tensor_util
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs, nn_impl

from poseidon.engine.moments import MomentsExchange, combine
from poseidon.engine.outside import Array
from poseidon.errors import ConfigError, MismatchError
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.tensorflow.graphs import rests_on_variables
from poseidon.tensorflow.moments import combine_moments
from poseidon.tensorflow.replacing import replace_everywhere
from poseidon.tensorflow.tagged import TaggedSums
from poseidon.tensorflow.waiting import Run, WaitingCalls

v1 = tf.compat.v1

VARIABLE = "POSEIDON_SYNC_BATCHNORM"
"""Set to 1 in the environment for batch moments over all workers."""
_NARROW = (tf.float16, tf.bfloat16)


def is_asked_for() -> bool:
    """Return whether the environment requests moments over all workers; by default each worker uses its own."""
    text = os.environ.get(VARIABLE, "0")
    if text not in ("0", "1"):
        raise ConfigError(f"environment variable {VARIABLE} is {text!r}, expected 1 (over all workers) or 0")
    return text == "1"


def check_choices(choices: Sequence[bool]) -> None:
    """Raise unless the environments of all workers, by rank, agree. Pure."""
    if len(set(choices)) > 1:
        on, off = ([rank for rank, choice in enumerate(choices) if choice is wanted] for wanted in (True, False))
        raise MismatchError(
            f"environment variable {VARIABLE} is 1 on ranks {on} and 0 or unset on ranks {off}; set it to the same "
            "value on all workers"
        )


class BatchMoments:
    """Replaces the functions that compute moments."""

    def __init__(self, team: Team, calls: WaitingCalls, report: ScriptReport, sync_batchnorm: bool) -> None:
        self._team = team
        self._calls = calls
        self._report = report
        self._is_on = sync_batchnorm
        self._is_agreed = False
        self._sums: TaggedSums | None = None
        self._tags = itertools.count()
        """All workers build the same graphs, so operations created at the same point have the same tag."""

    def install(self, patches: Patches) -> None:
        """Install the replacements."""
        if self._team.size > 1:
            replace_everywhere(patches, nn_impl.moments, self._moments)
            replace_everywhere(patches, nn_impl.fused_batch_norm, self._fused)

    # Replacements.

    def _moments(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not is_session_graph():
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        x = given["x"] = tf.convert_to_tensor(given["x"])
        axes = find_axes(x, given["axes"])
        if axes is None or not self._concerns(x, axes):
            return original(**given)
        if x.dtype in _NARROW:
            given["x"] = tf.cast(x, tf.float32)
        mean, variance = original(**given)
        mean, variance, _ = self._combine(mean, variance, _count(x, axes), x.op.name)
        return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)

    def _fused(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given["is_training"] or not is_session_graph():
            return original(*args, **kwargs)
        x = given["x"] = tf.convert_to_tensor(given["x"])
        letters = given["data_format"]
        axes = [axis for axis, letter in enumerate(letters) if letter != "C"]
        if x.shape.rank != len(letters) or not self._concerns(x, axes):
            return original(**given)
        with tf.name_scope(given["name"] or "FusedBatchNorm"):
            return self._normalize(x, axes, given)

    def _normalize(self, x: Any, axes: Sequence[int], given: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Do what the fused operation does, with moments over all workers."""
        wide = tf.cast(x, tf.float32)
        count = _count(x, axes)
        mean = tf.reduce_mean(wide, axes, keepdims=True)
        variance = tf.reduce_mean(tf.math.squared_difference(wide, tf.stop_gradient(mean)), axes, keepdims=True)
        mean, variance, total = self._combine(mean, variance, count, x.op.name)
        shape = mean.shape
        scale, offset = (tf.reshape(given[name], shape) for name in ("scale", "offset"))
        y = tf.nn.batch_normalization(wide, mean, variance, offset, scale, given["epsilon"])
        # The variance it returns, unlike the one it divides by, is the sample variance (Bessel's correction).
        unbiased = variance * tf.cast(total / tf.maximum(total - 1.0, 1.0), variance.dtype)
        factor, size = given["exponential_avg_factor"], [-1]
        given_out = []
        for new, old in ((mean, given["mean"]), (unbiased, given["variance"])):
            flat = tf.stop_gradient(tf.reshape(new, size))
            given_out.append(flat if factor == 1.0 else (1.0 - factor) * old + factor * flat)
        return tf.cast(y, x.dtype), given_out[0], given_out[1]

    # Inside.

    def _concerns(self, x: Any, axes: Sequence[int]) -> bool:
        """Return whether moments over these axes are a batch's and should span all workers."""
        if 0 not in axes or not x.dtype.is_floating:
            return False
        is_known = all(size is not None for axis, size in enumerate(x.shape.as_list()) if axis not in axes)
        if not is_known or rests_on_variables(x):
            return False
        self._agree()
        if not self._is_on:
            self._report.say(f"batch moments are of each worker's own rows; {VARIABLE}=1 takes them over all workers")
        else:
            self._report.say("batch moments are taken over the rows of all workers")
        return self._is_on

    def _agree(self) -> None:
        """Raise unless the settings of all workers agree.

        Checked when a graph first computes moments, which all workers do, not when TensorFlow is imported, which a
        logger may do on one worker alone.
        """
        if not self._is_agreed:
            choices = self._team.gather_ints([int(self._is_on)], VARIABLE)
            check_choices([bool(choice) for (choice,) in choices])
            self._is_agreed = True

    def _combine(self, mean: Any, variance: Any, count: Any, name: str) -> tuple[Any, Any, Any]:
        """Return moments over all workers, in the shape of this worker's, and the number of their rows."""
        if self._sums is None:
            self._sums = TaggedSums(self._team)
        exchange = _GraphMoments(self._team, self._sums, self._calls, self._tags, name, count)
        flat = tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
        whole_mean, whole_variance = combine_moments(*flat, exchange.forward, exchange.backward)
        return tf.reshape(whole_mean, mean.shape), tf.reshape(whole_variance, mean.shape), exchange.total


class _GraphMoments:
    """The exchange of one pair of moments, as operations in a graph."""

    def __init__(
        self, team: Team, sums: TaggedSums, calls: WaitingCalls, tags: Iterator[int], name: str, count: Any
    ) -> None:
        self._team = team
        self._sums = sums
        self._calls = calls
        self._tags = tags
        self._name = name
        self._count = count
        self.total = count
        """Rows of all workers, each counted once; known after :meth:`forward`."""

    def forward(self, mean: Any, variance: Any) -> list[Any]:
        """Return mean and variance over all workers, and the share of this worker's rows."""
        tag = next(self._tags)

        def exchange(run: Run, mean: Array, variance: Array, count: Array) -> list[Array]:
            moments = MomentsExchange(self._team, self._sums.of(tag, run.number), lambda: run.weight)
            parts = moments.gather(mean, variance, float(count), self._name)
            whole = [np.asarray(value, mean.dtype) for value in combine(parts, self._team.rank)]
            return [*whole, count_rows(parts, is_divided=run.weight > 0)]

        inputs = [mean, variance, self._count]
        *whole, self.total = self._calls.call(exchange, inputs, [mean, variance, tf.ones([], mean.dtype), self._count])
        return whole

    def backward(self, by_mean: Any, by_variance: Any, share: Any) -> list[Any]:
        """Return the sums of all workers' gradients. Every call of tf.gradients has its own."""
        tag = next(self._tags)

        def exchange(run: Run, by_mean: Array, by_variance: Array, share: Array) -> Sequence[Array]:
            # Without a weight, samples are rows of a dataset: a worker's share of them is its share of these rows.
            weight = run.weight or float(share) * self._team.size
            channel = self._sums.of(tag, run.number)
            return MomentsExchange(self._team, channel, lambda: weight).backward(by_mean, by_variance, self._name)

        return self._calls.call(exchange, [by_mean, by_variance, share], [by_mean, by_variance])


def count_rows(parts: Array, is_divided: bool) -> Array:
    """Return how many rows the moments of all workers cover. Pure.

    Unless the batch is known to be divided (``is_divided``), workers with identical moments have identical rows: some
    batches stay whole on every worker.
    """
    counts = parts[:1, 0] if not is_divided and (parts == parts[0]).all() else parts[:, 0]
    return np.asarray(counts.sum())


def find_axes(x: Any, axes: Any) -> list[int] | None:
    """Return axes counted from the front, if the graph determines them."""
    if x.shape.rank is None:
        return None
    known = tensor_util.constant_value(tf.convert_to_tensor(axes)) if tf.is_tensor(axes) else np.asarray(axes)
    return None if known is None else [int(axis) % x.shape.rank for axis in known.reshape(-1)]


def _count(x: Any, axes: Sequence[int]) -> Any:
    return tf.cast(tf.reduce_prod(tf.gather(tf.shape(x, tf.int64), axes)), tf.float64)


def is_session_graph() -> bool:
    """Return whether operations go into a session's graph or a branch of it, not a loop or a dataset's function."""
    if tf.executing_eagerly():
        return False
    graph = v1.get_default_graph()
    while True:
        if control_flow_util.GetContainingWhileContext(graph._get_control_flow_context()) is not None:
            return False
        if not isinstance(graph, control_flow_v2_func_graphs.CondBranchFuncGraph):
            return not graph.building_function
        graph = graph.outer_graph
