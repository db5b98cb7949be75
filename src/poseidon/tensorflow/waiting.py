"""Python calls in a TensorFlow 1 graph that wait for other workers without blocking one of TensorFlow's threads.

A graph's operations run in any order that their inputs allow, on a few threads, perhaps only one. An operation that
blocks could occupy the last thread of worker A until worker B reaches the same point, while B blocks its last thread on
what A would do next: a deadlock. So a call consists of two operations. One hands its inputs to a thread of our own and
returns. The other takes the results from a TensorFlow queue, where it waits without a thread. Calls need no common
order, so a branch, a second loss or a run of only some calls cannot break one.

A run that fails leaves calls behind, here or on other workers, whose results are never taken. None may reach a later
run.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from poseidon.engine.outside import Array
from poseidon.errors import UnsupportedError

v1 = tf.compat.v1

Function = Callable[..., Sequence[Array]]
"""Takes the run, and the inputs as arrays."""

_FAILURE = (
    "training run {} ended by {} while batch moments were on their way between the workers; no further run can be kept "
    "apart from what is left of it. If a dataset has ended, let it repeat() and count the steps, or train without "
    "POSEIDON_SYNC_BATCHNORM"
)


@dataclass(frozen=True)
class Run:
    """One run of a session together with other workers."""

    number: int
    """Equal on all workers if they make the same runs."""
    weight: float
    """As :meth:`WaitingCalls.running` was given it."""


@dataclass(frozen=True)
class _Door:
    """The way results enter the graph."""

    values: Sequence[Any]
    """Placeholders: one for the number of the run, and one per result."""
    enter: Any
    """The operation that hands them over."""
    close: Any
    """The operation that fails the run that waits for them."""


class WaitingCalls:
    """Adds calls to graphs, and serves them while a session runs them together with other workers."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._sessions: dict[int, Any] = {}
        """The current runs by number."""
        self._begun: set[int] = set()
        """Those of them that have made calls."""
        self._failure: str | None = None
        """How a run that had made calls ended."""
        self._inputs: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """By graph, the name of the placeholder for a run's number and weight."""
        self.error: BaseException | None = None
        """The first error of a call; TensorFlow only sees that no results arrive."""

    @contextlib.contextmanager
    def running(self, session: Any, weight: float) -> Iterator[dict[Any, Array]]:
        """Serve calls during one run; yields what must be fed to it. Without the feed, a run makes no calls.

        Raises UnsupportedError after a run that failed when it had made calls.
        """
        name = self._inputs.get(session.graph)
        if name is None:
            yield {}
            return
        if self._failure is not None:
            raise UnsupportedError(self._failure) from self.error
        number = next(self._numbers)
        self._sessions[number] = session
        try:
            yield {session.graph.get_tensor_by_name(name).ref(): np.array([number, weight])}
        except BaseException as error:
            if number in self._begun:
                self._failure = _FAILURE.format(number, type(error).__name__)
            raise
        finally:
            del self._sessions[number]
            self._begun.discard(number)

    def call(self, function: Function, inputs: Sequence[Any], otherwise: Sequence[Any]) -> list[Any]:
        """Return tensors with a function's results; they are ``otherwise`` in runs that make no calls.

        The results have the types and shapes of ``otherwise``, which are at least two.
        """
        with tf.name_scope("poseidon"), tf.device("/cpu:0"):
            run = self._input_of_graph()
            types = [run.dtype, *(tensor.dtype for tensor in otherwise)]
            queue = tf.queue.FIFOQueue(1, types)
            with tf.init_scope():
                values = [v1.placeholder(dtype) for dtype in types]
                door = _Door(values, queue.enqueue(values), queue.close(cancel_pending_enqueues=True))

            # tf.cond written out: tf.cond itself builds functions, which is slow in a model with many layers.
            is_together = run[0] > 0
            passed = tf.raw_ops.Switch(data=run, pred=is_together).output_true
            begun = tf.numpy_function(self._begin(function, door), [passed, *inputs], tf.int32, stateful=True)
            with tf.control_dependencies([begun]):
                number, *found = queue.dequeue()
            is_ours = tf.raw_ops.Assert(condition=tf.equal(number, passed[0]), data=["results of run", number])
            with tf.control_dependencies([is_ours]):
                found = [tf.identity(result) for result in found]
            results = []
            for result, tensor in zip(found, otherwise, strict=True):
                plain = tf.raw_ops.Switch(data=tensor, pred=is_together).output_false
                results.append(tf.raw_ops.Merge(inputs=[plain, result]).output)
                results[-1].set_shape(tensor.shape)
            return results

    def _input_of_graph(self) -> Any:
        with tf.init_scope():  # inside a branch, the placeholder is the whole graph's
            graph = v1.get_default_graph()
            if graph not in self._inputs:
                self._inputs[graph] = v1.placeholder_with_default(np.zeros(2), [2], "run").name
            return graph.get_tensor_by_name(self._inputs[graph])

    def _begin(self, function: Function, door: _Door) -> Callable[..., Any]:
        def begin(run: Array, *inputs: Array) -> Any:
            now = Run(int(run[0]), float(run[1]))
            self._begun.add(now.number)
            copies = [np.array(array) for array in inputs]  # TensorFlow lends its memory for this call only
            finish = (door, now.number, lambda: function(now, *copies))
            threading.Thread(target=self._finish, args=finish, name="poseidon-call", daemon=True).start()
            return np.int32(0)

        return begin

    def _finish(self, door: _Door, number: int, compute: Callable[[], Sequence[Array]]) -> None:
        feeds = None
        try:
            feeds = dict(zip(door.values, [number, *compute()], strict=True))
        except BaseException as error:
            self.error = self.error or error
        session = self._sessions.get(number)
        if session is None:
            return  # the run has failed elsewhere, and nothing waits any more
        try:
            session.run(door.close if feeds is None else door.enter, feeds)
        except BaseException as error:
            self.error = self.error or error
