"""Local steps: each worker steps its own optimizer by itself, and the workers exchange parameters now and then.

Before: the user's ``optimizer.step()``. After: the worker's next forward, at once, or when a fragment has arrived
(``rounds.py`` decides, ``outer.py`` computes). During ``warmup_steps`` gradients are exchanged in every backward, as
with :class:`~poseidon.DistributedDataParallel`; from then on the engine exchanges nothing, and only counts steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon.engine.discover import check_same_parameters, find_units
from poseidon.engine.engine import Engine
from poseidon.engine.loads import Loads
from poseidon.engine.optimizers import (
    check_known,
    check_max_norm,
    check_optimizer,
    clear_gradients,
    clip_before_steps,
    defer,
    give_back,
    parameters_of,
)
from poseidon.engine.outer import Fragment, Outer, Read, check_outer
from poseidon.engine.own_steps import OwnSteps
from poseidon.engine.policy import Policy
from poseidon.engine.rounds import Landed, LocalRounds
from poseidon.errors import ConfigError, UnsupportedError
from poseidon.job import settings
from poseidon.job.closing import Stage, at_exit
from poseidon.planning.cluster import Cluster
from poseidon.planning.local import LOCAL, LocalPlan, LocalSchedule, cut_fragments, make_local_plan
from poseidon.planning.lossy import read_warmup
from poseidon.planning.numbers import real_number
from poseidon.routes.base import Context, LiveUnit
from poseidon.routes.means import ExactMeans, LossyMeans, Means, find_codec, share_of
from poseidon.routes.sharded import combines_first
from poseidon.team.mirror import mirror_all
from poseidon.team.team import Team
from poseidon.team.verify import check_same_bits
from poseidon.units import ParameterSpec


class ServerAveraging:
    """Averages fragments through a parameter server, exactly or compressed. Construction is collective."""

    def __init__(
        self, team: Team, cluster: Cluster, fragments: Sequence[Fragment], compression: str | None = None
    ) -> None:
        self.size = team.size
        # From each worker's own environment, but all must send alike.
        checks = int(settings.CHECK_REPLICAS.read() > 0)
        self.checks = bool(team.gather_ints([checks], "how often to compare replicas")[0][0])
        self._team = team
        self._names = [fragment.name for fragment in fragments]
        flats = [flat for fragment in fragments for flat in fragment.flats]
        self._first = [0, *itertools.accumulate(len(fragment.flats) for fragment in fragments)]
        context = Context(team, cluster, any(flat.is_cuda for flat in flats))
        if compression is None:
            self._means: Means = ExactMeans(context, flats)
        else:
            lossy = [
                at + place for at, each in zip(self._first, fragments, strict=False) for place in each.value_places
            ]
            self._means = LossyMeans(context, flats, lossy, compression)
        self._is_closed = False
        self._cancel = at_exit(Stage.EXCHANGES, self.close)

    def start(self, number: int, fragment: int, flats: Sequence[Tensor]) -> Landed:
        """Begin to replace each of ``flats`` by its mean."""
        name, first = self._names[fragment], self._first[fragment]
        under_way = [self._means.average(first + place, flat, number, name) for place, flat in enumerate(flats)]

        def landed() -> None:
            for exchange in under_way:
                exchange.finish(True)

        return landed

    def rests(self) -> dict[int, Tensor]:
        """Return what compression has left out so far, on this worker."""
        return self._means.rests()

    def differ(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Raise the error for outer parameters that differ between workers. Collective."""
        check_same_bits(self._team, named)

    def close(self) -> None:
        """Flush what is queued, and stop the threads."""
        if not self._is_closed:
            self._is_closed = True
            self._cancel()
            self._means.close()


class LocalUpdates(Policy):
    """Steps the optimizer on this worker's own gradients, and exchanges parameters by a schedule."""

    holds_replicas = False
    takes_steps = True
    is_copyable = False
    is_updating = True
    """The optimizer's state always belongs to a finished step."""
    steps_later = False

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: LocalSchedule,
        outer: Outer = None,
        *,
        mix: float = 0.5,
        warmup_steps: int = 0,
        max_grad_norm: float | None = None,
        with_buffers: bool = True,
        compress: str | None = None,
    ) -> None:
        check_optimizer(optimizer)
        check_max_norm(max_grad_norm)
        check_outer(outer)
        if compress is not None:
            find_codec(compress)
        kept = real_number(mix)
        if kept is None or not 0 <= kept < 1:
            raise ConfigError(f"mix is {mix!r}; expected the share of its own weights that a worker keeps, from 0 to 1")
        self.plain = type(optimizer)
        self.schedule = schedule
        # What is under way when a worker is lost cannot be done again; and by time, steps differ between workers.
        self.is_lasting = not schedule.overlap and bool(schedule.every)
        self.rounds: LocalRounds | None = None
        """None before :meth:`connect`, and for a single worker that has nothing to do between its steps."""
        self.steps = 0
        """Steps of the warm-up so far."""
        self._optimizer = optimizer
        self._outer = outer
        self._mix = kept
        # A fraction would never be reached: rounds would begin from what the parameters were before the warm-up.
        self._warmup_steps = read_warmup(warmup_steps)
        self._max_grad_norm = max_grad_norm
        self._with_buffers = with_buffers
        self._compress = compress
        self._engine: Engine | None = None
        self._units: Sequence[LiveUnit] = ()
        self._buffers: dict[str, Read] = {}
        self._undo: list[Callable[[], None]] = []
        self._samples = 0
        self._steps = OwnSteps(optimizer, max_grad_norm)

    @property
    def is_warming_up(self) -> bool:
        """Whether gradients are still exchanged in every backward."""
        return self.steps < self._warmup_steps

    def connect(self, module: nn.Module, engine: Engine | None) -> None:
        """Take over the optimizer's steps, and agree on the parameters as they are. Collective."""
        self._engine = engine
        is_alone = engine is None
        if is_alone and self._outer in (None, "average"):
            # The mean of one worker's parameters is what they are.
            if self._max_grad_norm is not None:
                self._undo.append(clip_before_steps(self._optimizer, module, self._max_grad_norm))
            return
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module = module
        self._known = frozenset(id(parameter) for parameter in module.parameters() if parameter.requires_grad)
        self._units = find_units(module, ignored) if engine is None else engine.units
        self._buffers = averaged_buffers(module, ignored) if self._with_buffers else {}
        self.rounds = open_rounds(
            engine, self._units, self._buffers, self.schedule, self._outer, self._mix, self._compress
        )
        if engine is not None:
            self._tell(engine)
        self._loads = Loads(module)
        self._undo.append(self._loads.close)
        defer(self._optimizer, self)
        self._undo.append(self._steps.take_over())
        # The others cannot finish without this worker what is under way when its script ends.
        self._undo.append(at_exit(Stage.STEPS, self._finish_unless_broken))

    @property
    def averaged(self) -> Collection[str]:
        """Names of the buffers that are exchanged with the parameters."""
        return self._buffers.keys()

    def plan(self, cluster: Cluster) -> LocalPlan:
        """Return what is exchanged, how often, and what that takes."""
        specs = [unit.spec for unit in self._units]
        extra = 0 if self.rounds is None else self.rounds.buffer_bytes
        return make_local_plan(
            specs,
            cluster,
            self.schedule,
            extra,
            share_of(self._compress),
            self._compress or "",
            self._engine is not None and combines_first(self._engine.team, self._engine.has_cuda),
        )

    def renewed(self) -> LocalUpdates:
        """Return updates of the same optimizer, among other workers; a checkpoint says how far they are."""
        renewed = LocalUpdates(
            self._optimizer,
            self.schedule,
            self._outer,
            mix=self._mix,
            warmup_steps=self._warmup_steps,
            max_grad_norm=self._max_grad_norm,
            with_buffers=self._with_buffers,
            compress=self._compress,
        )
        renewed.steps = self.steps
        return renewed

    def load_rounds(self, rounds: LocalRounds, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, whose outer parameters were loaded into the model."""
        self._loads.take()
        rounds.load_shared_state(state)

    # What the wrapper and the front end call.

    def before_forward(self, module: nn.Module, asks: bool, is_joining: bool) -> None:  # noqa: ARG002 - as in the contract
        """Go on from values that were loaded, before a forward changes buffers.

        Not in an evaluation: what was loaded for that alone is replaced again before training goes on.
        """
        if torch.is_grad_enabled():
            self._take_loaded()

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:
        """Start an exchange of gradients; called during the warm-up only."""
        assert self._engine is not None
        self._engine.begin_backward(unused)

    def end_backward(self) -> None:
        """Complete it."""
        assert self._engine is not None
        try:
            self._engine.end_backward()
        except BaseException as error:
            # Whatever it was, ``.grad`` is not the mean, and no step may use it.
            self._engine.fail(error)
            raise

    def finish(self) -> None:
        """Wait until what is under way has arrived; it takes effect when it is due."""
        if self.rounds is not None:
            self._carefully(self.rounds.finish)

    def synchronize(self) -> None:
        """Exchange now what is left of a round. Collective."""
        if self.rounds is not None and not self.is_warming_up:
            self._take_loaded()
            self._carefully(self.rounds.synchronize)

    def drain(self) -> None:
        """Take part in the others' exchanges until all workers are done. Collective."""
        if self.rounds is not None:
            self._take_loaded()
            self._carefully(self.rounds.drain)

    # Replacements for the optimizer's own methods.

    def step(self) -> None:
        """Update this worker's parameters, and exchange what is due."""
        self._check_failure()
        engine, rounds = self._engine, self.rounds
        assert rounds is not None
        check_same_parameters(self._module, self._known)
        self._take_loaded()
        self._steps.step(self._parameters)
        if self.is_warming_up:
            self.steps += 1
            if self.steps == self._warmup_steps:
                self._carefully(partial(self._begin_rounds, rounds))
            return
        samples = 1
        if engine is not None:
            samples, self._samples = engine.samples - self._samples, engine.samples
            engine.pass_step()
        self._carefully(partial(rounds.step, samples or 1))

    def zero_grad(self, set_to_none: bool = True, parameters: Sequence[nn.Parameter] | None = None) -> bool:
        """Clear the gradients of the optimizer's parameters, or of these."""
        if self.rounds is None:
            return False
        clear_gradients(parameters_of(self._optimizer) if parameters is None else parameters, set_to_none)
        return True

    def note_cleared(self) -> None:
        """No-op: gradients are each worker's own."""

    def show_state(self) -> None:
        """No-op: the state is always here."""

    def take_state(self) -> None:
        """No-op: the optimizer uses it where it is."""

    def check_group(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise if somebody adds parameters to the optimizer that nobody shares."""
        check_known(parameters, self._known)

    def close(self) -> None:
        """Finish what is under way, and restore the optimizer's own class."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self.rounds is None:
            return
        try:
            self._finish_unless_broken()
        finally:
            give_back(self._optimizer, self.plain)
            rounds, self.rounds = self.rounds, None
            rounds.close()
            if self._engine is not None:
                self._engine.close()
                self._engine = None

    # Inside.

    def _take_loaded(self) -> None:
        if self.rounds is not None and self._loads.is_due:
            loaded = self._loads.take()
            if loaded:
                self._carefully(partial(self.rounds.take_loaded, loaded))

    def _begin_rounds(self, rounds: LocalRounds) -> None:
        """Begin from the parameters after the warm-up, with the buffers that the next forward would have had."""
        if self._engine is not None and self._buffers:
            mirror_all(self._engine.team, [read().detach() for read in self._buffers.values()], 0, "the buffers")
        rounds.restart()

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for unit in self._units for parameter in unit.parameters]

    def _tell(self, engine: Engine) -> None:
        """Tell whoever watches the job what is exchanged."""
        recorder = engine.team.watch.recorder
        assert self.rounds is not None
        if recorder is None or engine.team.rank != 0:
            return
        plan = self.plan(engine.cluster)
        share = [fragment.size_bytes / max(1, self.rounds.size_bytes) for fragment in self.rounds.fragments]
        names = [fragment.name for fragment in self.rounds.fragments]
        rows = [
            (LOCAL, name, plan.round_bytes * part, plan.round_s * part) for name, part in zip(names, share, strict=True)
        ]
        link = engine.cluster.between if len(engine.team.topology.machines) > 1 else None
        recorder.tell_plan(str(plan).splitlines()[0], engine.step, rows, 0.0 if link is None else 8 * link.bytes_per_s)

    def _carefully(self, act: Callable[[], None]) -> None:
        self._check_failure()
        try:
            act()
        except BaseException as error:
            if self._engine is not None:
                self._engine.fail(error)
            raise

    def _finish_unless_broken(self) -> None:
        if self.rounds is not None and (self._engine is None or self._engine.failure is None):
            self.rounds.finish()

    def _check_failure(self) -> None:
        if self._engine is not None and self._engine.failure is not None:
            raise UnsupportedError(
                f"rank {self._engine.team.rank}: an exchange was interrupted by an error, so the replicas may differ; "
                "restart from a checkpoint"
            ) from self._engine.failure


def open_rounds(
    engine: Engine | None,
    units: Sequence[LiveUnit],
    buffers: Mapping[str, Read],
    schedule: LocalSchedule,
    outer: Outer,
    kept: float = 0.5,
    compress: str | None = None,
) -> LocalRounds:
    """Return the rounds of some units and buffers, which are the same on all workers now. Collective.

    Without an ``engine`` the worker is alone.
    """
    cuts = cut_fragments([unit.spec for unit in units], schedule)
    parts = [{spec.name: p for unit in units[cut.start : cut.stop] for spec, p in _named(unit)} for cut in cuts]
    rounds = LocalRounds(parts, buffers, schedule, outer, kept)
    if engine is not None:
        rounds.average_by(ServerAveraging(engine.team, engine.cluster, rounds.fragments, compress))
    return rounds


def _named(unit: LiveUnit) -> list[tuple[ParameterSpec, nn.Parameter]]:
    for spec, parameter in zip(unit.spec.parameters, unit.parameters, strict=True):
        if not parameter.is_floating_point():
            raise UnsupportedError(
                f"{spec.name} has type {parameter.dtype}; local steps average floating-point parameters only"
            )
    return list(zip(unit.spec.parameters, unit.parameters, strict=True))


def averaged_buffers(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Read]:
    """Return the buffers that are averaged with the parameters: statistics, not counters."""
    found: dict[str, Read] = {}
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            path = f"{prefix}.{name}" if prefix else name
            if buffer is not None and buffer.is_floating_point() and path not in ignored:
                found[path] = partial(_current, owner._buffers, name)
    return found


def _current(buffers: Mapping[str, Tensor | None], name: str) -> Tensor:
    buffer = buffers[name]
    assert buffer is not None
    return buffer
