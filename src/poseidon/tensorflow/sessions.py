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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.client import session as sessions
from tensorflow.python.training import basic_session_run_hooks

from poseidon.engine.outside import step_weight
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.tensorflow.feeds import Division, join_results, plan_division
from poseidon.tensorflow.gradients import Exchanged, GraphGradients
from poseidon.tensorflow.graphs import Purpose, find_purpose, length_of
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

    def __init__(self, team: Team, gradients: GraphGradients, calls: WaitingCalls, report: ScriptReport) -> None:
        self._team = team
        self._gradients = gradients
        self._calls = calls
        self._report = report
        self._purposes: weakref.WeakKeyDictionary[Any, dict[Any, Purpose]] = weakref.WeakKeyDictionary()
        self._trainings: weakref.WeakKeyDictionary[Any, _Training] = weakref.WeakKeyDictionary()
        self._own = threading.local()
        """Whether a run is our own, not the script's."""
        self.has_trained = False

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        patches.wrap(sessions.BaseSession, "_do_run", self._run)
        patches.wrap(sessions.BaseSession, "make_callable", self._make_callable)
        patches.wrap(sessions.BaseSession, "close", self._close)
        patches.wrap(basic_session_run_hooks.SecondOrStepTimer, "should_trigger_for_step", self._is_time)

    def take_over(self, session: Any, variables: Sequence[Any]) -> None:
        """Make variables of a session equal to worker 0's. Collective."""
        with self._ours():
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
        purpose = self._purpose(session, [*targets, *fetches], feeds)
        if purpose is None or not (purpose.exchanges or purpose.started):
            return original(session, handle, targets, fetches, feeds, *rest)
        if not purpose.exchanges:
            results = original(session, handle, targets, fetches, feeds, *rest)
            self.take_over(session, purpose.started)
            return results
        taken = [self._gradients.exchanges[number] for number in purpose.exchanges]
        division = self._divide(feeds)
        weight = step_weight(division.shares[self._team.rank], division.shares) if division.shares else 0.0
        try:
            with self._calls.running(session, weight) as besides:
                given = {**self._given(feeds, taken, division), **besides}
                *results, count = original(session, handle, targets, [*fetches, taken[0].count], given, *rest)
        except tf.errors.OpError as error:
            causes = [*(one.exchange.error for one in taken), self._calls.error]
            cause = next((cause for cause in causes if cause is not None), None)
            if cause is not None:
                raise cause from error
            raise
        has_open_rows = [length_of(tensor) is None for tensor in fetches]
        joined = join_results(self._team, results, has_open_rows, int(count), division)
        self._after_step(session, purpose, taken)
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

    def _is_time(self, original: Callable[..., Any], timer: Any, step: Any) -> bool:
        """Make hooks that go by the clock use worker 0's, so that all workers fetch the same tensors."""
        mine = bool(original(timer, step))
        if timer._every_secs is None:
            return mine
        return bool(self._team.gather_ints([int(mine)], "the time of a hook")[0][0])

    # Inside.

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        before = getattr(self._own, "is_inside", False)
        self._own.is_inside = True
        try:
            yield
        finally:
            self._own.is_inside = before

    def _purpose(self, session: Any, elements: Sequence[Any], feeds: dict[Any, Any]) -> Purpose | None:
        if getattr(self._own, "is_inside", False):
            return None
        graph = session.graph
        fed = frozenset(reference.deref().name for reference in feeds)
        begins = self._gradients.begins(graph)
        key = (frozenset(element.name for element in elements), fed, len(begins))
        known = self._purposes.setdefault(graph, {})
        if key not in known:
            known[key] = find_purpose(graph, elements, fed, begins)
        return known[key]

    def _divide(self, feeds: dict[Any, Any]) -> Division:
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

    def _after_step(self, session: Any, purpose: Purpose, taken: Sequence[Exchanged]) -> None:
        self.has_trained = True
        training = self._trainings.setdefault(session, _Training())
        training.steps += 1
        for one in taken:
            training.variables.update({variable.op.name: variable for variable in one.variables})
        is_compared = training.steps in _COMPARED_STEPS or training.steps % max(_COMPARED_STEPS) == 0
        if is_compared:
            training.alike.clear()
        self._settle(session, purpose, training)
        if is_compared:
            self._compare(session)
        if training.steps == 1:
            for one in taken:
                self._say_routes(one)

    def _settle(self, session: Any, purpose: Purpose, training: _Training) -> None:
        """Copy worker 0's moving averages and the like; what follows from equal gradients is already equal."""
        known = self._gradients.owned(session.graph) | training.alike | training.variables.keys()
        loose = [v for v in purpose.assigned if v.dtype.base_dtype.is_floating and v.op.name not in known]
        if loose:
            with self._ours():
                training.alike |= {variable.op.name for variable in settle(self._team, session, loose)}

    def _compare(self, session: Any) -> None:
        variables = list(self._trainings[session].variables.values())
        with self._ours():
            compare(self._team, session, variables)

    def _say_routes(self, one: Exchanged) -> None:
        plan = one.exchange.front.plan
        if plan is not None:
            counts = Counter(plan.routes.values())
            routes = ", ".join(f"{route} ({count})" for route, count in sorted(counts.items()))
            self._report.say(f"{one.label}: variables travel by {routes}")
