"""The front end between a Caffe net and the engine: several workers train one net.

Each worker reads its own batches. As soon as the backward pass has left a layer, that layer's gradients (InnerProduct:
their factors; Embed: the rows it touched) are handed to the engine and travel while the layers below still compute.
When an iteration ends, every diff is the mean over all workers: the objective is that of one machine with the total
batch.
"""

from __future__ import annotations

import logging
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable

import torch

from poseidon.caffe.joined import JoinedWorkers
from poseidon.caffe.layers.embed import Embed
from poseidon.caffe.net import BuiltNet
from poseidon.caffe.net_units import NetUnit, find_net_units, gets_gradient
from poseidon.caffe.solver.workers import Action, ActionFunction
from poseidon.engine.assemble import ExchangeOptions, assemble_engine
from poseidon.engine.engine import Engine
from poseidon.engine.options import Options
from poseidon.errors import ConfigError
from poseidon.planning.planner import Plan, check_overrides
from poseidon.routes import standard_routes
from poseidon.team.mirror import mirror_all

log = logging.getLogger("poseidon.caffe")

_Sink = Callable[[torch.Tensor, torch.Tensor], None]


class Together(JoinedWorkers):
    """The workers of torch's default process group, training one net (see ``solver/workers.py`` for the calls).

    The constructor is collective: it copies worker 0's parameters and raises if the workers' nets differ.
    """

    def __init__(self, net: BuiltNet, options: ExchangeOptions | None = None) -> None:
        options = options or ExchangeOptions()
        self._units = find_net_units(net)
        if not self._units:
            raise ConfigError(f"net {net.name!r} learns nothing, so there is nothing to train on several workers")
        check_overrides([unit.live.spec for unit in self._units], dict(options.routes or {}), standard_routes())
        super().__init__(net, options.timeout_s)
        self._engine = self._make_engine(options)
        self._plan: Plan | None = None
        self._is_exchanging = False
        self._is_first_pass = True
        self._ready_at: dict[int, list[tuple[NetUnit, int]]] = defaultdict(list)
        for unit in self._units:
            for number, entry in enumerate(unit.entries):
                self._ready_at[entry.ready_layer].append((unit, number))
        net.after_backward_callbacks.append(self._layer_done)
        # The background threads must not outlive the solver.
        self._release = weakref.finalize(self, self._engine.close)
        self._release.atexit = False

    @property
    def plan(self) -> Plan | None:
        """The routes in force; None before the end of the first iteration."""
        return self._engine.plan

    # What the solver calls.

    def begin_iteration(self) -> None:
        """Prepare for the passes of one iteration."""
        for unit in self._units:
            for parameter in unit.live.parameters:
                parameter.grad = None
        inputs = [i for i in range(len(self._net.layers)) if not self._net.bottoms_of(i)]
        self._engine.arm(True, sum(top.count for i in inputs for top in self._net.tops_of(i)))
        self._is_first_pass = True

    def begin_backward(self, is_last: bool) -> None:
        """Prepare for a backward pass; all passes of an iteration are one backward to the engine."""
        if self._is_first_pass:
            self._engine.begin_backward()
            self._set_sinks()
            self._is_first_pass = False
        if self._engine.is_observing:
            for unit in self._units:
                if unit.kind != "dense":
                    self._engine.observe(unit.live, unit.load(self._net))
        self._is_exchanging = is_last

    def end_iteration(self) -> None:
        """Wait until every parameter's diff is the mean over all workers."""
        self._is_exchanging = False
        self._engine.end_backward()
        for unit in self._units:
            for parameter, entry in zip(unit.live.parameters, unit.entries, strict=True):
                assert parameter.grad is not None
                entry.blob.put_diff(parameter.grad)
        if self._engine.plan is not self._plan:
            self._plan = self._engine.plan
            log.info("Plan of the exchange:\n%s", self._plan)

    def end_update(self) -> None:
        """Do nothing: equal gradients keep the parameters equal."""

    def ask(self, wanted: ActionFunction) -> ActionFunction:
        """Start a gather of all workers' actions; calling the result waits for it and returns the largest."""
        pending = self._team.start_gather([int(wanted())])
        return lambda: Action(max(row[0] for row in pending("the others' signals")))

    def settle(self) -> None:
        """Copy the root's values of what no gradient keeps equal, such as BatchNorm's running averages."""
        blobs = [entry.blob for entry in self._net.learnable if not gets_gradient(self._net, entry)]
        if not blobs:
            return
        rows = self._team.gather_ints([zlib.crc32(blob.data.data) for blob in blobs], "the others' running averages")
        changed = [blob for blob, sums in zip(blobs, zip(*rows, strict=True), strict=True) if len(set(sums)) > 1]
        mirror_all(self._team, [blob.data_tensor for blob in changed], 0, "running averages")

    def close(self) -> None:
        """End the background threads and detach from the net."""
        self._net.after_backward_callbacks.remove(self._layer_done)
        for unit in self._units:
            unit.layer.factor_sink = None
            if isinstance(unit.layer, Embed):
                unit.layer.rows_sink = None
        self._release()

    # Inside.

    def _make_engine(self, options: ExchangeOptions) -> Engine:
        team, device = self._team, self._units[0].live.weight.device
        units = [unit.live for unit in self._units]
        return assemble_engine(units, team, device, Options(keep_views=True, routes=options.routes), options.cluster)

    def _set_sinks(self) -> None:
        """Make layers hand over factors or rows where the plan says so, full gradients elsewhere."""
        for unit in self._units:
            if unit.kind == "linear":
                unit.layer.factor_sink = self._factor_sink(unit) if self._engine.collects(unit.live) else None
            elif isinstance(unit.layer, Embed) and unit.kind == "embedding":
                unit.layer.rows_sink = self._rows_sink(unit) if self._engine.makes_rows(unit.live) else None

    def _factor_sink(self, unit: NetUnit) -> _Sink:
        def sink(top_diff: torch.Tensor, bottom_rows: torch.Tensor) -> None:
            self._engine.give(unit.live, *unit.order_factors(self._kept(top_diff), self._kept(bottom_rows)))

        return sink

    def _rows_sink(self, unit: NetUnit) -> _Sink:
        def sink(rows: torch.Tensor, diff: torch.Tensor) -> None:
            unit.rows.append((self._kept(rows), self._kept(diff)))

        return sink

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        # With iter_size, the next pass may overwrite the blob this tensor belongs to before it is sent.
        return tensor if self._is_exchanging else tensor.clone()

    def _layer_done(self, index: int) -> None:
        """Hand over the gradients that are complete once the backward pass has left layer ``index``."""
        if not self._is_exchanging:
            return
        for unit, number in self._ready_at.get(index, ()):
            parameter, blob = unit.live.parameters[number], unit.entries[number].blob
            is_short = self._is_short(unit)
            if not is_short:
                parameter.grad = blob.diff_tensor
            elif unit.kind == "embedding":
                parameter.grad = unit.take_rows()
            else:
                # The engine derives the bias gradient from the factors too; the layer's own sum is not needed.
                blob.clear_diff()
            self._engine.parameter_ready(parameter, is_dense=not is_short)

    def _is_short(self, unit: NetUnit) -> bool:
        if unit.kind == "linear":
            return unit.layer.factor_sink is not None
        return unit.kind == "embedding" and isinstance(unit.layer, Embed) and unit.layer.rows_sink is not None
