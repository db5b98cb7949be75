"""Every ``Session.run`` of a TensorFlow 1 script: what all workers do together before and after it.

After a run that initializes variables, all workers take worker 0's values. A training run gets this worker's rows of
the fed batch; afterwards its results are combined, and variables that the step has left different are made equal.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.client import session as sessions
from tensorflow.python.framework import ops
from tensorflow.python.training import basic_session_run_hooks

from poseidon.engine.outside import step_weight
from poseidon.errors import UnsupportedError
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.tensorflow.combined import CombinedRun, is_number
from poseidon.tensorflow.combining import MEAN
from poseidon.tensorflow.datasets import Datasets
from poseidon.tensorflow.feeds import Division, join_results, plan_division
from poseidon.tensorflow.gradients import Exchanged, GraphGradients
from poseidon.tensorflow.graphs import Purpose, find_purpose, length_of
from poseidon.tensorflow.probes import BatchRows, find_assignments
from poseidon.tensorflow.variables import compare, settle, take_over
from poseidon.tensorflow.waiting import WaitingCalls

_COMPARED_STEPS = (1, 10, 100, 1000)
"""Steps after which replicas are compared bit by bit; then after every thousandth, and when a session closes."""


@dataclass
class _Training:
    """The state of a session that trains."""

    steps: int = 0
    variables: dict[str, Any] = field(default_factory=dict)
    """The variables that its optimizers train."""
    alike: set[str] = field(default_factory=set)
    """Assigned variables that were equal on all workers: they follow from state that is kept equal anyway."""


class Sessions:
    """Replaces ``Session.run``."""

    def __init__(
        self, team: Team, gradients: GraphGradients, datasets: Datasets, calls: WaitingCalls, report: ScriptReport
    ) -> None:
        self._team = team
        self._gradients = gradients
        self._datasets = datasets
        self._combinations: weakref.WeakKeyDictionary[Any, dict[Any, CombinedRun]] = weakref.WeakKeyDictionary()
        self._calls = calls
        self._report = report
        self._purposes: weakref.WeakKeyDictionary[Any, dict[Any, Purpose]] = weakref.WeakKeyDictionary()
        self._trainings: weakref.WeakKeyDictionary[Any, _Training] = weakref.WeakKeyDictionary()
        self._ways: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
        """By graph, how the workers' values of variables and tensors are combined."""
        self._used: weakref.WeakSet[Any] = weakref.WeakSet()
        """Graphs that a session has run."""
        self._own = threading.local()
        """Whether a run is our own, not the script's."""
        self.has_trained = False

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        patches.wrap(sessions.BaseSession, "_do_run", self._run)
        patches.wrap(sessions.BaseSession, "make_callable", self._make_callable)
        patches.wrap(sessions.BaseSession, "close", self._close)
        patches.wrap(ops.Graph, "finalize", self._finalize)
        patches.wrap(basic_session_run_hooks.SecondOrStepTimer, "should_trigger_for_step", self._is_time)

    def prepare(self, graph: Any) -> None:
        """Change what must be changed in a graph before any worker runs it. Collective."""
        self._gradients.find_updates(graph, is_open=self._is_open(graph))

    def take_over(self, session: Any, variables: Sequence[Any]) -> None:
        """Make variables of a session equal to worker 0's. Collective."""
        with self.ours():
            take_over(self._team, session, variables)

    def verify(self) -> None:
        """Raise unless the open sessions hold the same values on all workers. Collective."""
        for session in list(self._trainings):
            self._compare(session)

    # Replacements.

    def _run(
        self,
        original: Callable[..., Any],
        session: Any,
        handle: Any,
        targets: list[Any],
        fetches: list[Any],
        feeds: dict[Any, Any],
        *rest: Any,
    ) -> Any:
        if not self._is_own:
            self.prepare(session.graph)
        purpose = self._purpose(session, [*targets, *fetches], feeds)
        if purpose is not None:
            self._check_updates(purpose)
        if purpose is None or not (purpose.exchanges or purpose.started):
            return original(session, handle, targets, fetches, feeds, *rest)
        if not purpose.exchanges:
            results = original(session, handle, targets, fetches, feeds, *rest)
            self.take_over(session, purpose.started)
            return results
        taken = [self._gradients.exchanges[number] for number in purpose.exchanges]
        division = self._divide(feeds, purpose)
        weight = step_weight(division.shares[self._team.rank], division.shares) if division.shares else 0.0
        combined = self._combined(session, purpose, fetches, feeds) if division.shares or purpose.dealt else None
        before = self._before(session, combined)
        batch = purpose.dealt if combined is not None and combined.is_learning else ()
        wanted = [*fetches, *batch, taken[0].count]
        try:
            with self._calls.running(session, weight) as besides:
                given = {**self._given(feeds, taken, division), **besides}
                *results, count = original(session, handle, targets, wanted, given, *rest)
        except tf.errors.OpError as error:
            causes = [*(one.exchange.error for one in taken), self._calls.error]
            cause = next((cause for cause in causes if cause is not None), None)
            if cause is not None:
                raise cause from error
            raise
        rows = dict(zip((tensor.name for tensor in batch), results[len(fetches) :], strict=True))
        results = results[: len(fetches)]
        if combined is None:
            ways = [MEAN if tensor.dtype.is_floating else 0 for tensor in fetches]
        else:
            if combined.is_learning:
                with self.ours():
                    combined.learn(session, _as_batch(feeds, rows, division))
            ways = [combined.way(tensor) for tensor in fetches]
        has_open_rows = [length_of(tensor) is None for tensor in fetches]
        joined, counts = join_results(self._team, results, has_open_rows, ways, int(count), division)
        if combined is not None:
            with self.ours():
                combined.settle(session, before, counts)
                joined = combined.refresh(session, fetches, joined, _by_name(given))
        self._after_step(session, purpose, taken, combined)
        return joined

    def _make_callable(
        self, original: Callable[..., Any], session: Any, fetches: Any, feed_list: Any = None, *rest: Any, **kwargs: Any
    ) -> Any:
        handler = sessions._FetchHandler(session.graph, fetches, {})
        purpose = self._purpose(session, [*handler.targets(), *handler.fetches()], {})
        if purpose is None or not (purpose.exchanges or purpose.started):
            return original(session, fetches, feed_list, *rest, **kwargs)
        return lambda *values, **_: session.run(fetches, dict(zip(feed_list or (), values, strict=True)))

    def _close(self, original: Callable[..., Any], session: Any) -> Any:
        # After an error do not wait for the others, which may never come.
        if session in self._trainings and sys.exc_info()[0] is None:
            self._compare(session)
            del self._trainings[session]
        return original(session)

    def _finalize(self, original: Callable[..., Any], graph: Any) -> Any:
        """Change what must be changed while it can be."""
        if not graph.building_function:
            self._gradients.find_updates(graph, is_open=graph not in self._used)
        return original(graph)

    def _is_time(self, original: Callable[..., Any], timer: Any, step: Any) -> bool:
        """Make hooks that go by the clock use worker 0's, so that all workers fetch the same tensors."""
        mine = bool(original(timer, step))
        if timer._every_secs is None:
            return mine
        return bool(self._team.gather_ints([int(mine)], "the time of a hook")[0][0])

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """Mark what is run in this context as not the script's: nothing of it is exchanged."""
        before = getattr(self._own, "is_inside", False)
        self._own.is_inside = True
        try:
            yield
        finally:
            self._own.is_inside = before

    # Inside.

    @property
    def _is_own(self) -> bool:
        return bool(getattr(self._own, "is_inside", False))

    def _is_open(self, graph: Any) -> bool:
        """Return whether no session has run this graph, so that it may still be changed; from now on one has."""
        is_open = graph not in self._used
        self._used.add(graph)
        return is_open

    def _check_updates(self, purpose: Purpose) -> None:
        """Raise, or say, that a run changes trained variables by itself: nothing of it is averaged."""
        if purpose.exchanges or purpose.started:
            return
        found = find_assignments([v for v in purpose.assigned if v.trainable], purpose.operations)
        trained = [one for one in found if not one.is_constant]
        if not trained:
            return
        names = ", ".join(one.variable.op.name for one in trained[:3])
        if purpose.dealt:
            raise UnsupportedError(
                f"{names}: a run assigns it from a dataset that is dealt out, without gradients to be averaged, so the "
                "workers would drift apart; update it through an optimizer's apply_gradients, or leave the dataset "
                "whole: POSEIDON_AUTO='--whole NAME'"
            )
        self._report.say(
            f"{names}: assigned from what is fed, without gradients that could be averaged; every worker computes all "
            "of it, which is right but saves no work"
        )

    def _purpose(self, session: Any, elements: Sequence[Any], feeds: dict[Any, Any]) -> Purpose | None:
        if self._is_own:
            return None
        graph = session.graph
        fed = frozenset(reference.deref().name for reference in feeds)
        begins = self._gradients.begins(graph)
        dealt = self._datasets.dealt(graph)
        key = (frozenset(element.name for element in elements), fed, len(begins), len(dealt))
        known = self._purposes.setdefault(graph, {})
        if key not in known:
            known[key] = find_purpose(graph, elements, fed, begins, dealt)
        return known[key]

    def _combined(
        self, session: Any, purpose: Purpose, fetches: Sequence[Any], feeds: dict[Any, Any]
    ) -> CombinedRun | None:
        """Return what is known of the numbers of a divided run, and of the variables it assigns besides training."""
        known = self._combinations.setdefault(session.graph, {})
        key = (id(purpose), *(tensor.name for tensor in fetches))
        if key not in known:
            trained = {v.op.name for number in purpose.exchanges for v in self._gradients.exchanges[number].variables}
            left = self._gradients.owned(session.graph) | trained
            ways = self._ways.setdefault(session.graph, {})
            known[key] = CombinedRun(self._team, self._report, purpose, fetches, _by_name(feeds), left, ways)
        return known[key]

    def _before(self, session: Any, combined: CombinedRun | None) -> list[Any]:
        if combined is None:
            return []
        with self.ours():
            return combined.read(session)

    def _divide(self, feeds: dict[Any, Any], purpose: Purpose) -> Division:
        fed = {}
        for reference, value in feeds.items():
            tensor = reference.deref()
            fed[tensor.op.name] = (length_of(tensor), np.asarray(value))
        division = plan_division(fed, self._team.size)
        if division.shares:
            total, mine = sum(division.shares), division.shares[0]
            self._report.say(
                f"fed batches are divided between the workers: of {total} rows this one computes {mine}; the result is "
                "that of one worker"
            )
        elif division.reason:
            self._report.say(f"fed batches stay whole on every worker, which saves no work: {division.reason}")
        elif not purpose.dealt:
            self._report.say(
                "a training run takes its data neither from feeds nor from a dataset that is dealt out, so nothing is "
                "divided; workers that read the same data compute the same, which saves no work"
            )
        return division

    def _given(self, feeds: dict[Any, Any], taken: Sequence[Exchanged], division: Division) -> dict[Any, Any]:
        if not division.shares:
            return feeds
        rows = division.rows(self._team.rank)
        given = {}
        for reference, value in feeds.items():
            is_batch = length_of(reference.deref()) is None and np.ndim(value) > 0
            given[reference] = value[rows] if is_batch else value
        count = np.asarray(division.shares[self._team.rank], np.int64)
        return {**given, **{one.samples.ref(): count for one in taken}}

    def _after_step(
        self, session: Any, purpose: Purpose, taken: Sequence[Exchanged], combined: CombinedRun | None
    ) -> None:
        self.has_trained = True
        training = self._trainings.setdefault(session, _Training())
        training.steps += 1
        for one in taken:
            training.variables.update({variable.op.name: variable for variable in one.variables})
        is_compared = training.steps in _COMPARED_STEPS or training.steps % max(_COMPARED_STEPS) == 0
        if is_compared:
            training.alike.clear()
        self._settle(session, purpose, training, set() if combined is None else combined.names)
        if is_compared:
            self._compare(session)
        if training.steps == 1:
            for one in taken:
                self._say_routes(one)

    def _settle(self, session: Any, purpose: Purpose, training: _Training, done: Collection[str]) -> None:
        """Copy worker 0's values of what could not be combined; what follows from equal gradients is already equal."""
        known = self._gradients.owned(session.graph) | training.alike | training.variables.keys() | set(done)
        loose = [v for v in purpose.assigned if is_number(v.dtype.base_dtype) and v.op.name not in known]
        if loose:
            with self.ours():
                alike = {variable.op.name for variable in settle(self._team, session, loose)}
            training.alike |= alike
            others = [variable.op.name for variable in loose if variable.op.name not in alike]
            if others:
                self._report.say(
                    f"{', '.join(others[:3])}: assigned from each worker's own data; worker 0's value is kept"
                )

    def _compare(self, session: Any) -> None:
        variables = list(self._trainings[session].variables.values())
        with self.ours():
            compare(self._team, session, variables)

    def _say_routes(self, one: Exchanged) -> None:
        plan = one.exchange.front.plan
        if plan is not None:
            counts = Counter(plan.routes.values())
            routes = ", ".join(f"{route} ({count})" for route, count in sorted(counts.items()))
            self._report.say(f"{one.label}: variables travel by {routes}")


def _by_name(feeds: Mapping[Any, Any]) -> dict[str, Any]:
    return {reference.deref().name: value for reference, value in feeds.items()}


def _as_batch(feeds: Mapping[Any, Any], rows: Mapping[str, Any], division: Division) -> BatchRows:
    """Return the batch of a run: what is fed, if that is divided, and what this worker took from a dataset."""
    values = {name: np.asarray(value) for name, value in rows.items() if np.ndim(value)}
    others: dict[str, Any] = {}
    for reference, value in feeds.items():
        tensor = reference.deref()
        is_cut = bool(division.shares) and length_of(tensor) is None and np.ndim(value) > 0
        (values if is_cut else others)[tensor.name] = np.asarray(value) if is_cut else value
    return BatchRows(values, others)
