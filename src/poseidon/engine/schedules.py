"""The plan of a model, and schedules bound to tensors and exchangers.

Everything a plan depends on is the same on all workers, so they all switch plans in the same step. Methods are
collective where they say so.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from poseidon.engine.backward import Backward, LiveSchedule
from poseidon.engine.choices import describe_job
from poseidon.engine.choosing import open_choosing
from poseidon.engine.options import Options
from poseidon.engine.replanning import Replanning
from poseidon.engine.stopwatch import Stopwatch
from poseidon.engine.trial import WARM_BACKWARDS
from poseidon.engine.warm_up import WarmUp
from poseidon.errors import ConfigError, UnsupportedError
from poseidon.planning.candidates import Candidate, make_candidates
from poseidon.planning.cluster import Cluster
from poseidon.planning.ordering import order_by_need
from poseidon.planning.planner import Plan, server_rivals_nccl, whole_routes
from poseidon.planning.route import Routes
from poseidon.planning.schedule import Model, Packing, Schedule, make_schedule
from poseidon.planning.transfers import Conditions, SentBits
from poseidon.routes.base import Context, Exchanger, LiveItem, LiveUnit, can_be_served
from poseidon.routes.buckets import Bucket
from poseidon.routes.catalogue import COLLECTIVES, ShardedRoute, served_routes, standard_routes
from poseidon.routes.feedback import Feedback
from poseidon.routes.lossy import lossy_routes
from poseidon.sim.ranking import observed_profile
from poseidon.sums.slots import chunk_bytes_for
from poseidon.team.nccl import nccl_uses_sockets
from poseidon.team.team import Team
from poseidon.units import Load
from poseidon.version import __version__

_is_joined, _batch = operator.attrgetter("is_joined"), operator.attrgetter("batch")


def check_encryptable(units: Sequence[LiveUnit], forced: Mapping[str, str]) -> None:
    """Refuse what could only travel unencrypted, in a job that encrypts. Pure."""
    known = standard_routes(encrypts=True)
    for pattern, route in forced.items():
        if route not in known:
            raise ConfigError(
                f"routes={{{pattern!r}: {route!r}}}: {route!r} is not encrypted, but this job must be "
                f"(POSEIDON_WIRE_ENCRYPT); choose from {', '.join(known)}"
            )
    for unit in units:
        for parameter in unit.parameters:
            if not can_be_served(parameter):
                raise UnsupportedError(
                    f"{unit.name} has parameters of {parameter.dtype}, whose gradients only gloo and NCCL can sum, "
                    "which do not encrypt, but this job must be encrypted (POSEIDON_WIRE_ENCRYPT)"
                )


class Schedules:
    """How the units of one model travel, before and after the first plan.

    ``routes`` defaults to those that suit the team and its devices. Construction is collective.
    """

    def __init__(
        self, units: Sequence[LiveUnit], team: Team, cluster: Cluster, options: Options, routes: Routes | None
    ) -> None:
        self._units = units
        self._team = team
        self._cluster = cluster
        self._options = options
        self._parameters: tuple[nn.Parameter, ...] = tuple(p for unit in units for p in unit.parameters)
        is_cuda = any(parameter.is_cuda for parameter in self._parameters)
        kept = None if options.lossy is None else options.feedback or Feedback()
        if kept is not None:
            kept.bind(units)
        self._context = Context(team, cluster, is_cuda, kept=kept)
        self._exchangers: dict[str, Exchanger] = {}
        if team.encrypts:
            check_encryptable(units, options.routes or {})
        self._can_serve = self._find_server()
        self.routes = self._choose_routes(is_cuda) if routes is None else routes
        self._choosing = open_choosing(team, self.routes, options.tries, self._parameters[0].device)
        specs = [unit.spec for unit in units]
        self._lossy: Mapping[str, str] = {}
        """Lossy routes by unit name."""
        self.warm_up: WarmUp | None = None
        """Exact steps before lossy ones, while they last."""
        if options.lossy is not None and routes is None:
            self._lossy = options.lossy.forced(specs, self.routes)
            if options.lossy.warmup_steps and self._lossy:
                assert kept is not None
                self.warm_up = WarmUp(options.lossy.warmup_steps, kept)
        # A sparse gradient shares no bucket with others.
        lone = [unit.index if unit.spec.is_sparse else -1 for unit in units for _ in unit.parameters]
        kinds = [(str(p.dtype), str(p.device), place) for p, place in zip(self._parameters, lone, strict=True)]
        self.model = Model.of(specs, kinds)
        self._planning = Replanning(
            specs,
            cluster,
            served_routes() if options.serves else self.routes,
            None if options.serves else self._forced(),
        )
        self._order = list(reversed(range(len(units))))
        """Units in the order in which their gradients are expected to become final."""
        self._packing = Packing(cluster, options.bucket_bytes, options.defers)
        """How the planned schedule is packed, and whether it defers landing."""
        self.keeps_forms = False
        """Whether a layer that travels in a short form does so in all plans: a change would compile the model anew."""
        self._waits_for_landing = False
        """A new plan is due as soon as a backward has landed before the next forward begins."""
        if self.warm_up is not None:
            # What lossy routes keep has its place from the beginning, as a checkpoint may be loaded into it.
            self._prepare(self._bind(self._pack(self._whole(self._lossy), self._packing)))
        self.dense = self._bind(self._pack(self._whole(self._lossy_now), self._packing))
        """Full gradients only."""
        self._later: Schedule | None = None
        """What :attr:`dense` becomes when it has been needed under the plan in force."""
        self._ends_dense = False
        """Whether it does so with the backward under way."""
        self._prepare(self.dense)
        self.planned: LiveSchedule | None = None
        self._adopted: Schedule | None = None
        """That of :attr:`planned`, before its collectives were reordered."""
        self._backwards = 0
        """Number of backwards run with the planned schedule."""
        self._is_timed = False
        """Whether the backward under way, or the last one, is timed."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the end of the first backward."""
        return self._choosing.plan

    @property
    def is_choosing(self) -> bool:
        """Whether other plans may still be tried."""
        return self.warm_up is not None or self._choosing.is_open

    @property
    def lands_at_once(self) -> bool:
        """Whether the backward under way must land at its end, although landing could be deferred.

        So must one that is timed: what settles it is collective, and after backward some worker may touch a parameter
        (for a checkpoint, say) while the others wait for it elsewhere.
        """
        ends = self.warm_up is not None and self.warm_up.lasts_one_more
        is_last = ends or self._waits_for_landing or self._choosing.changes_next or self._ends_dense
        return not self._packing.defers or self._is_timed or is_last

    def agree_on_warm_up(self) -> None:
        """Leave exact steps out that were taken before, by this job or by other workers. Collective the first time."""
        if self.warm_up is not None and self.warm_up.is_over(self._team):
            self._lose()
            self.dense = self._bind(self._pack(self._whole(self._lossy), self._packing))
            self._prepare(self.dense)

    def observe(self, unit: LiveUnit, load: Load) -> None:
        """Record load on a unit, for the first plan."""
        self._planning.observe(unit.name, load)

    def settle(self, backward: Backward) -> None:
        """Learn from a closed backward, and change the plan if due. Collective."""
        assert backward.step.verdict is not None
        calls = backward.step.verdict.calls
        is_planned = backward.live is self.planned
        # Asked first: it was true when this backward ended only if it is now.
        has_landed = self.lands_at_once
        is_ranked = self._use_times(backward)
        if self.warm_up is not None:
            self.warm_up.count()
        if any(map(_is_joined, calls)):
            self._choosing.settled(is_regular=False)
            return
        if self._choosing.has_losers and is_planned:
            self._release_losers()
        if self._plan_if_due(sum(map(_batch, calls)) / len(calls), backward, has_landed):
            return
        if self._ends_dense:
            self._adopt_dense()
        if is_ranked:
            return  # a trial begins with the next backward
        is_odd = not is_planned or self._planning.is_odd
        change = self._choosing.settled(is_regular=not is_odd)
        if change is not None:
            self._adopt(change)

    def close(self) -> None:
        """Flush queued data, and stop the threads of all routes."""
        self._context.close()
        for exchanger in self._exchangers.values():
            exchanger.close()

    def mark_rounded(self, parameters: Collection[nn.Parameter], tables: Collection[nn.Parameter]) -> None:
        """Let these parameters, whose rounded values suffice, travel apart from the others. Before the first plan.

        Each of the ``tables`` among them travels alone, so that its rows can be found.
        """
        self._context.rounded.update(parameters)
        kinds = [
            (kind, p in parameters, number if p in tables else -1)
            for number, (kind, p) in enumerate(zip(self.model.kinds, self._parameters, strict=True))
        ]
        self.model = Model.of(self.model.units, kinds)

    @property
    def _lossy_now(self) -> Mapping[str, str]:
        return self._lossy if self.warm_up is None else {}

    def _forced(self) -> dict[str, str]:
        """Return routes by unit name or pattern, of which the first that matches counts."""
        return {**self._lossy_now, **(self._options.routes or {})}

    def _whole(self, lossy: Mapping[str, str], plan: Plan | None = None) -> list[str]:
        """Return the route of each unit's full gradients, under a plan or before there is one."""
        if plan is None:
            exact = [self.routes.first_for(unit.spec).name for unit in self._units]
        else:
            exact = whole_routes(plan, self.model.units, self.routes)
        return [lossy.get(unit.name, name) for unit, name in zip(self._units, exact, strict=True)]

    def _lose(self) -> None:
        """Let the next plan have lossy routes: the warm-up is over."""
        self.warm_up = None
        self._planning.overrides = self._forced()

    def _choose_routes(self, is_cuda: bool) -> Routes:
        if self._options.serves:
            # The first backward travels by the first route that accepts everything.
            whole = next(iter(standard_routes(encrypts=self._team.encrypts).values()))
            return Routes([whole, *served_routes().values()])
        topology, gathers = self._team.topology, self._options.gather_factors
        exact = standard_routes(
            offers_server=self._offers_server(),
            gathers_factors=is_cuda and self._team.is_nccl if gathers is None else gathers,
            combines_first=topology.has_levels and topology.is_even and not is_cuda,
            chunk_bytes=chunk_bytes_for(self._cluster.between.bytes_per_s, lands_whole=not self._options.defers),
            encrypts=self._team.encrypts,
        )
        return Routes([*exact.values(), *lossy_routes(self._options.lossy)])

    def _offers_server(self) -> bool:
        return self._can_serve and (not self._team.is_nccl or self._options.defers)

    def _find_server(self) -> bool:
        """Return whether the parameter server can carry all full gradients, and about as fast as NCCL. Collective."""
        if not all(map(can_be_served, self._parameters)):
            return False
        return not self._team.is_nccl or (server_rivals_nccl(self._cluster) and nccl_uses_sockets(self._team))

    def _plan_if_due(self, batch: float, backward: Backward, has_landed: bool) -> bool:
        """Plan after the first backward, and anew when the batch has changed permanently; return whether it did.

        ``has_landed``: the backward lands at its end, so no forward is under way.
        """
        if self.warm_up is not None and self.warm_up.left == 0 and has_landed:
            self._lose()
            if self.plan is not None:
                self._plan(self._planning.scaled_loads(batch), batch)
                # Exact routes that only the warm-up used.
                self._choosing.has_losers = True
                return True
        if self.plan is None:
            self._order = self._team.gather_ints(backward.step.ready_order, "the order of gradients")[0]
            self._plan(self._common_loads(), batch)
            return True
        is_due = not self._options.serves and self._planning.is_due(batch)
        loads = self._planning.scaled_loads(batch) if is_due else {}
        if is_due and not self._planning.is_worthwhile(loads):
            is_due = False
            if not self._choosing.is_open:  # plans that are under trial are compared by steps of one size
                self._planning.accept(loads, batch)
        if not is_due:
            self._waits_for_landing = False
        elif has_landed:
            self._waits_for_landing = False
            self._plan(loads, batch)
            return True
        else:
            # A forward that is under way may already have prepared for the old plan.
            self._waits_for_landing = True
        return False

    def _plan(self, loads: dict[str, Load], batch: float) -> None:
        """Plan layer by layer, and begin to choose among this and other whole plans. Collective."""
        best = self._planning.make(loads, batch)
        first = Candidate(best, Packing(self._cluster, self._options.bucket_bytes, self._options.defers))
        if not self._choosing.tries or self.warm_up is not None:
            self._adopt(self._choosing.begin([first], ""))
            return
        candidates = self._make_candidates(first, loads)
        self._adopt(self._choosing.begin(candidates, self._describe(candidates, loads)))

    def _make_candidates(self, first: Candidate, loads: dict[str, Load]) -> tuple[Candidate, ...]:
        """Return all whole plans, the given one first. Collective."""
        fulls = ["allreduce", *(["sharded"] if self._can_serve and self._cluster.machines > 1 else [])]
        known = [name for name in fulls if name in self.routes] or [next(iter(self.routes))]
        forms = self._team.gather_ints([int(self.keeps_forms)], "the choice of a plan")
        keeps_forms = any(row[0] for row in forms)
        return make_candidates(
            self.model, self._order, loads, self.routes, self._forced(), first.plan, first.packing, known, keeps_forms
        )

    def _describe(self, candidates: Sequence[Candidate], loads: dict[str, Load]) -> str:
        """Return what a stored choice among these plans is known by."""
        options, device = self._options, self._parameters[0].device
        others: dict[str, Any] = {
            "versions": [__version__, torch.__version__],
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "plans": [one.name for one in candidates],
            "options": [options.bucket_bytes, options.defers, sorted((options.routes or {}).items())],
        }
        if options.lossy is not None:
            others["lossy"] = repr(options.lossy)
        return describe_job(self.model.units, loads, self._cluster, others)

    def _common_loads(self) -> dict[str, Load]:
        """Return the workers' mean load for each unit, in values of the widest type that any of them used. Collective.

        The mean, because workers' rows may differ in each step, as those of a mixture's experts do, and over the steps
        every worker has the most rows now and then.
        """
        special = [unit for unit in self._units if unit.spec.kind != "dense"]
        mine = [self._planning.loads.get(unit.name, Load(0)) for unit in special]
        everybody = self._team.gather_ints([word for load in mine for word in load.words()])
        loads = {}
        for i, unit in enumerate(special):
            each = (Load.from_words(words[Load.WORDS * i : Load.WORDS * (i + 1)]) for words in everybody)
            seen = [load for load in each if load.rows or load.touched]
            if seen:
                loads[unit.name] = reduce(Load.plus, seen).scaled(1 / self._team.size)
        return loads

    def _adopt(self, candidate: Candidate) -> None:
        """Use a plan from the next backward on. Collective."""
        self._backwards = 0
        self._packing = candidate.packing
        schedule = self._pack(list(candidate.plan.routes.values()), candidate.packing)
        if schedule == self._adopted:
            return  # what it is bound to is not made anew
        self._adopted = schedule
        self.planned = self.dense = self._bind(schedule)
        self._later = None
        whole = self._pack(self._whole(self._lossy_now, candidate.plan), candidate.packing)
        if self._options.serves or whole == schedule:
            self._prepare(self.planned)
            return
        # Its buffers are needed only after no_sync, and the server's memory for them is taken only if that happens.
        first = self._pack(self._whole(self._lossy_now), candidate.packing)
        self._later = whole if whole != first else None
        self.dense = self._bind(first)
        self._prepare(self.planned, self.dense)

    def _adopt_dense(self) -> None:
        """Let full gradients travel by the plan's routes where all of them must. Collective."""
        assert self.planned is not None
        assert self._later is not None
        self.dense, self._later = self._bind(self._later), None
        self._prepare(self.planned, self.dense)

    def _release_losers(self) -> None:
        """Close the routes that only dropped plans used; every worker has finished the steps of those plans."""
        assert self.planned is not None
        self._choosing.has_losers = False
        used = {self.routes[name].exchanger for name in (*self.planned.exchangers, *self.dense.exchangers)}
        for name in set(self._exchangers) - used:
            self._exchangers.pop(name).close()

    def _pack(self, route_of: Sequence[str], packing: Packing) -> Schedule:
        return make_schedule(
            self.model, route_of, self._order, self.routes, packing, self._planning.loads, packing.defers
        )

    def _bind(self, schedule: Schedule) -> LiveSchedule:
        """Bind a schedule to tensors and exchangers. Collective; :meth:`_prepare` must follow."""
        items = tuple(self._make_item(schedule, number) for number in range(len(schedule.items)))
        used = {item.item.route for item in items}
        exchangers = {name: self._exchanger(self.routes[name].exchanger) for name in self.routes if name in used}
        return LiveSchedule(schedule, items, exchangers, [self.routes[name].delivers for name in schedule.route_of])

    def _prepare(self, *schedules: LiveSchedule) -> None:
        """Let exchangers prepare for the schedules in force, which may share a route. Collective."""
        for name in self.routes:
            mine = [item for live in schedules for item in live.items if self.routes[item.item.route].exchanger == name]
            if mine:
                self._exchanger(name).prepare(mine)

    def _make_item(self, schedule: Schedule, number: int) -> LiveItem:
        item, options = schedule.items[number], self._options
        parameters = tuple(self._parameters[p] for p in item.parameters)
        keeps_views = options.keep_views and not options.serves
        # What is kept lies as the parameters do, and a gradient that travels in place may lie otherwise.
        is_in_place = not options.serves and (
            not self.routes[item.route].is_lossy or all(parameter.is_contiguous() for parameter in parameters)
        )
        bucket = (
            Bucket(parameters, keeps_views, is_in_place, keeps_views and options.defers)
            if item.is_packed or options.serves
            else None
        )
        return LiveItem(item, tuple(self._units[unit] for unit in item.units), parameters, bucket)

    def _exchanger(self, name: str) -> Exchanger:
        """Return the open exchanger of a route. Collective the first time, when it connects."""
        if name not in self._exchangers:
            self._exchangers[name] = self.routes[name].open(self._context)
        return self._exchangers[name]

    def begin(self, live: LiveSchedule) -> Stopwatch[int] | None:
        """Begin a backward with :attr:`planned` or :attr:`dense`; return a stopwatch if it is to be timed.

        One is after a plan: the best order under deferred landing and the best plan depend on it.
        """
        self._is_timed = False
        self._ends_dense = live is self.dense and self._later is not None
        if live is not self.planned:
            return None
        self._backwards += 1
        if self._backwards != WARM_BACKWARDS or not (self._packing.defers or self._choosing.needs_times):
            return None
        self._is_timed = True
        return Stopwatch(self._parameters[0].device)

    def _use_times(self, backward: Backward) -> bool:
        """Order collectives by the times of a backward, and return whether it ranked plans. Collective if timed."""
        stopwatch, planned = backward.stopwatch, self.planned
        if stopwatch is None or planned is None or backward.live is not planned:
            return False
        schedule = planned.schedule
        mine = [round(stopwatch.ready_s(number) * 1e6) for number in range(len(schedule.items))]
        everybody = self._team.gather_ints(mine, "the times of gradients")
        # A collective starts when the slowest worker is ready for it.
        ready_s = {number: max(times) / 1e6 for number, times in enumerate(zip(*everybody, strict=True))}
        is_ranked = self._choosing.needs_times
        if is_ranked:
            server = self._exchangers.get(ShardedRoute.name)
            sent_bits = SentBits() if server is None else server.sent_bits()
            self._choosing.rank(observed_profile(schedule, ready_s, self._planning.loads, self._order), sent_bits)
        queue = schedule.queues.get(COLLECTIVES, ())
        if queue and self._packing.defers:
            order = order_by_need([ready_s[number] for number in queue], self._wire_s(stopwatch, schedule, queue))
            is_dense = self.dense is planned
            self.planned = planned.reordered(COLLECTIVES, order)
            self.dense = self.planned if is_dense else self.dense
        return is_ranked

    def _wire_s(self, stopwatch: Stopwatch[int], schedule: Schedule, queue: Sequence[int]) -> list[float]:
        """Return how long the collectives of a queue take, on the slowest worker. Collective."""
        conditions, rate = Conditions(self._cluster), self._cluster.between.bytes_per_s
        items = [schedule.items[number] for number in queue]
        transfers = [self.routes[item.route].transfers(item, conditions) for item in items]
        guessed_s = [sum(transfer.out_bytes for transfer in each) / rate for each in transfers]
        mine = [round(value * 1e6) for value in stopwatch.wire_s(queue) or guessed_s]
        everybody = self._team.gather_ints(mine, "the times of collectives")
        return [max(times) / 1e6 for times in zip(*everybody, strict=True)]
