"""Where TensorFlow 1 scripts get gradients for training, and how means replace them.

An optimizer's ``compute_gradients`` returns means, so whatever a script does next (clipping, logging) sees them. Many
scripts use ``tf.gradients`` instead and process the results before ``apply_gradients``; then the exchange is inserted
later, right after the gradients, and every operation between there and the optimizer reads means. Gradients that never
reach an optimizer are not exchanged.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
import torch.distributed as dist
from tensorflow.python.ops import gradients_impl
from tensorflow.python.training import optimizer as optimizers
from tensorflow.python.training import server_lib, sync_replicas_optimizer

from poseidon.engine.assemble import ExchangeOptions
from poseidon.engine.outside import OutsideFrontEnd, check_alike
from poseidon.errors import UnsupportedError
from poseidon.following.nesting import Nesting
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.planning.cluster import Cluster
from poseidon.team.team import Team
from poseidon.tensorflow.exchange import GraphExchange, check_no_strategy
from poseidon.tensorflow.forms import Form
from poseidon.tensorflow.graphs import (
    ASSIGNMENTS,
    find_ancestors,
    find_batch,
    find_descendants,
    holder_of,
    redirect,
    tensors_of,
)
from poseidon.tensorflow.replacing import replace_everywhere

v1 = tf.compat.v1

Pair = tuple[Any, Any]
"""A gradient, or None, and its variable."""


@dataclass(frozen=True)
class Exchanged:
    """One exchange in a graph: the gradients of one call."""

    exchange: GraphExchange
    samples: Any
    """Placeholder for the samples that this worker adds in a run; by default the rows of the tf.data batch, or 1."""
    count: Any
    """The same tensor inside a run."""
    variables: tuple[Any, ...]
    label: str


@dataclass
class _Notes:
    """The exchanges of one graph."""

    begins: dict[str, int] = field(default_factory=dict)
    """The operation that begins each exchange, and the exchange's number."""
    calls: list[tuple[list[Any], list[Pair]]] = field(default_factory=list)
    """Results of ``tf.gradients``: the differentiated tensors, and the gradients of variables."""
    looked_at: int = 0
    """The graph's version when updates by hand were last looked for."""
    owned: set[str] = field(default_factory=set)
    """Names of the optimizers' own variables."""


class GraphGradients:
    """Hooks optimizers and ``tf.gradients``, and keeps the exchanges of all graphs."""

    def __init__(self, team: Team, report: ScriptReport, rate: float = 1.0) -> None:
        self._team = team
        self._report = report
        self._rate = rate
        """Factor for learning rates."""
        self._scaled: weakref.WeakSet[Any] = weakref.WeakSet()
        self._notes: weakref.WeakKeyDictionary[Any, _Notes] = weakref.WeakKeyDictionary()
        self._cluster: Cluster | None = None
        self._nesting = Nesting()
        self.exchanges: list[Exchanged] = []

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        patches.wrap(optimizers.Optimizer, "compute_gradients", self._compute)
        patches.wrap(optimizers.Optimizer, "apply_gradients", self._apply)
        for original in (gradients_impl.gradients, gradients_impl.gradients_v2):
            replace_everywhere(patches, original, self._record)
        for kind in (sync_replicas_optimizer.SyncReplicasOptimizer, server_lib.Server):
            patches.wrap(kind, "__init__", _refuse)
        patches.on_undo(self.close)

    def begins(self, graph: Any) -> dict[str, int]:
        """Return the operations of a graph that begin an exchange, with its number."""
        return self._notes_of(graph).begins

    def find_updates(self, graph: Any, is_open: bool) -> None:
        """Average the gradients with which a script updates variables by hand, without an optimizer. Collective.

        A graph that a session has already taken over cannot be changed; then such a gradient is an error (not
        ``is_open``).
        """
        notes = self._notes_of(graph)
        if not notes.calls or notes.looked_at == graph.version:
            return
        for ys, pairs in notes.calls:
            means_or_later = find_descendants(graph.get_operation_by_name(name) for name in notes.begins)
            found = [
                (pair, updates) for pair in pairs if (updates := _find_updates(pair, means_or_later, notes.begins))
            ]
            if not found:
                continue
            names = ", ".join(variable.op.name for (_, variable), _ in found[:3])
            if not is_open or graph.finalized:
                raise UnsupportedError(
                    f"{names}: the script updates it by hand, with a gradient of tf.gradients that cannot be averaged, "
                    "because a session has already used the graph. Build all of the graph before the first run, or "
                    "update through an optimizer's apply_gradients"
                )
            ways = find_ancestors(update for _, updates in found for update in updates)
            sources = [gradient for (gradient, _), _ in found]
            targets: list[Pair] = [(None, variable) for (_, variable), _ in found]
            with graph.as_default():
                self._exchange_behind("tf.gradients", ys, sources, ways, targets, list(range(len(targets))))
        notes.looked_at = graph.version

    def owned(self, graph: Any) -> set[str]:
        """Return the names of the optimizers' own variables in a graph: they follow from the gradients."""
        return self._notes_of(graph).owned

    def close(self) -> None:
        """End the engines."""
        for exchanged in self.exchanges:
            exchanged.exchange.front.close()
        self.exchanges.clear()

    # Replacements.

    def _compute(self, original: Callable[..., Any], optimizer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        _check(optimizer, is_eager=callable(loss))
        bound = inspect.signature(original).bind(optimizer, loss, *args, **kwargs)
        # The means wait for all gradients anyway. Gates would only force the computation of a layer's full gradient
        # although its factors travel instead.
        bound.arguments["gate_gradients"] = optimizers.Optimizer.GATE_NONE
        with self._nesting.enter():
            pairs = original(*bound.args, **bound.kwargs)
        return self._exchange(type(optimizer).__name__, [loss], pairs)

    def _apply(self, original: Callable[..., Any], optimizer: Any, pairs: Any, *args: Any, **kwargs: Any) -> Any:
        _check(optimizer)
        self._scale(optimizer)
        updated = original(optimizer, self._completed(type(optimizer).__name__, list(pairs)), *args, **kwargs)
        self._notes_of(v1.get_default_graph()).owned.update(v.op.name for v in optimizer.variables())
        return updated

    def _record(self, original: Callable[..., Any], ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(ys, xs, *args, **kwargs)
        if not self._nesting.is_inside and isinstance(xs, (list, tuple)):
            pairs = [(g, x) for g, x in zip(found, xs, strict=True) if isinstance(x, tf.Variable) and g is not None]
            if pairs:
                calls = self._notes_of(v1.get_default_graph()).calls
                calls.append((list(ys) if isinstance(ys, (list, tuple)) else [ys], pairs))
        return found

    # Inside.

    def _scale(self, optimizer: Any) -> None:
        if self._rate == 1.0 or optimizer in self._scaled:
            return
        self._scaled.add(optimizer)
        for name in ("_learning_rate", "_lr"):
            value = getattr(optimizer, name, None)
            if value is not None:
                setattr(optimizer, name, (value() if callable(value) else value) * self._rate)

    def _notes_of(self, graph: Any) -> _Notes:
        return self._notes.setdefault(graph, _Notes())

    def _completed(self, label: str, pairs: list[Pair]) -> list[Pair]:
        """Return the pairs with means; gradients outside any exchange get one."""
        graph = v1.get_default_graph()
        notes = self._notes_of(graph)
        means_or_later = find_descendants(graph.get_operation_by_name(name) for name in notes.begins)
        strangers = [
            i
            for i, (gradient, _) in enumerate(pairs)
            if gradient is not None and means_or_later.isdisjoint(tensor.op.name for tensor in tensors_of(gradient))
        ]
        if not strangers:
            return pairs
        ways = find_ancestors(tensor for i in strangers for tensor in tensors_of(pairs[i][0]))
        for ys, raw in reversed(notes.calls):
            found = {variable.ref(): gradient for gradient, variable in raw}
            sources = [found.get(pairs[i][1].ref()) for i in strangers]
            if all(source is not None and _leads(source, ways) for source in sources):
                return self._exchange_behind(label, ys, sources, ways, pairs, strangers)
        self._report.say(f"{label}: gradients that did not come from tf.gradients are averaged before they are applied")
        ys = [tensor for i in strangers for tensor in tensors_of(pairs[i][0])]
        means = self._exchange(label, ys, [pairs[i] for i in strangers])
        return _replaced(pairs, dict(zip(strangers, (mean for mean, _ in means), strict=True)))

    def _exchange_behind(
        self,
        label: str,
        ys: list[Any],
        sources: list[Any],
        ways: dict[str, Any],
        pairs: list[Pair],
        strangers: list[int],
    ) -> list[Pair]:
        """Exchange the results of an earlier ``tf.gradients``; operations from there to the optimizer read means."""
        before = find_ancestors(tensor for source in sources for tensor in tensors_of(source))
        exchanged = self._exchange(label, ys, [(g, pairs[i][1]) for g, i in zip(sources, strangers, strict=True)])
        means = [mean for mean, _ in exchanged]
        for source, mean in zip(sources, means, strict=True):
            redirect(tensors_of(source), tensors_of(mean), ways.keys() - before.keys())
        direct = {i: m for i, s, m in zip(strangers, sources, means, strict=True) if pairs[i][0] is s}
        return _replaced(pairs, direct)

    def _exchange(self, label: str, ys: Sequence[Any], pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs with means instead of gradients. Collective."""
        used = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        if not used:
            return list(pairs)
        forms = [Form(gradient, variable) for gradient, variable in used]
        front = self._make_front(forms)
        exchange = GraphExchange(front, [form.unit(i) for i, form in enumerate(forms)])
        rows = find_batch(find_ancestors(ys))
        with tf.name_scope("poseidon"), tf.device("/cpu:0"):
            usual = tf.constant(1, tf.int64) if rows is None else tf.shape(rows, tf.int64)[0]
            samples = v1.placeholder_with_default(usual, [])
            count = tf.identity(samples)
            # Not before the loss is computed: until then a run may end because its data has ended.
            with tf.control_dependencies(ys):
                token = exchange.begin(count)
            means = exchange.average([form.flat for form in forms], token)
        number = len(self.exchanges)
        self._notes_of(v1.get_default_graph()).begins[token.op.name] = number
        self.exchanges.append(Exchanged(exchange, samples, count, tuple(variable for _, variable in used), label))
        size = sum(math.prod(form.variable.shape) for form in forms)
        self._report.say(
            f"{label}: {len(used)} variables, {size:,} parameters; gradients are averaged in the graph, during backward"
        )
        found = iter(form.complete(mean) for form, mean in zip(forms, means, strict=True))
        return [(gradient if gradient is None else next(found), variable) for gradient, variable in pairs]

    def _make_front(self, forms: Sequence[Form]) -> OutsideFrontEnd:
        # Exchanges run concurrently, so each has its own channels: nothing orders one's messages against another's.
        team = Team(dist.new_group(), self._team.timeout_s)
        variables = [form.variable for form in forms]
        check_alike(team, variables)
        options = ExchangeOptions(cluster=self._cluster, timeout_s=self._team.timeout_s)
        front = OutsideFrontEnd(team, variables, [form.unit(i) for i, form in enumerate(forms)], options)
        if self._cluster is None and front.engine.cluster.source == "measured":
            self._cluster = front.engine.cluster
        return front


def _check(optimizer: Any, is_eager: bool = False) -> None:
    check_no_strategy(optimizer)
    if is_eager or tf.executing_eagerly() or v1.get_default_graph().building_function:
        raise UnsupportedError(
            f"{type(optimizer).__name__}: eager code with tf.compat.v1's optimizers is not supported; call "
            "tf.compat.v1.disable_eager_execution() first, or use a Keras optimizer"
        )


def _refuse(_: Callable[..., Any], one: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001 - as the original
    raise UnsupportedError(
        f"this script distributes itself (tf.train.{type(one).__name__}); run it without --auto, or remove that part "
        "so that it runs on one device"
    )


def _leads(source: Any, ways: dict[str, Any]) -> bool:
    return any(tensor.op.name in ways for tensor in tensors_of(source))


def _replaced(pairs: Sequence[Pair], means: dict[int, Any]) -> list[Pair]:
    return [(means.get(i, gradient), variable) for i, (gradient, variable) in enumerate(pairs)]


def _find_updates(pair: Pair, means_or_later: Collection[str], begins: Collection[str]) -> list[Any]:
    """Return the operations that assign a variable from its gradient, unless an exchange gets that gradient."""
    gradient, variable = pair
    reached = find_descendants(tensor.op for tensor in tensors_of(gradient))
    if not reached.isdisjoint(means_or_later) or not reached.isdisjoint(begins):
        return []
    operations = (variable.graph.get_operation_by_name(name) for name in sorted(reached))
    return [one for one in operations if one.type in ASSIGNMENTS and holder_of(one.inputs[0]) is variable.op]
