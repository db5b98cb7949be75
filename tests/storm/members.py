"""Workers that die and come again, in the simulated world: an elastic job whose state is spread over its workers.

Real: the roster, the team and its wire, replicas, what the workers of a new epoch agree on, and how shards are dealt
anew. Simulated: the launcher's messages, and the training: numbers of which each step makes others, and which only
their owner has. The invariants: a step that a worker has called complete is never taken back, and at the end every
number is that of an undisturbed job; or a shard is lost because all who had it have died.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from poseidon.checkpoints import replicas
from poseidon.checkpoints.memory import Kept
from poseidon.checkpoints.replicas import Replicator, hand_on
from poseidon.checkpoints.shards import Dealt, Inheritance, RunState, ValueRun, pack
from poseidon.checkpoints.sharing import Agreement, Stock, agree
from poseidon.engine.lasting import deal
from poseidon.errors import PoseidonError, WorkerLostError
from poseidon.job.elastic import NEVER, Seat
from poseidon.launch.roster import Bounds, EpochOver, Roster, Seated
from poseidon.team.membership import Membership
from poseidon.team.team import Team
from storm.jobs import TIMEOUT_S, SimulatedStore, draw_plan
from storm.network import network_of
from storm.patching import simulated
from storm.world import Process, World, here

VALUES = 24
LIMIT_S = 300.0
BEAT_S = 0.05
"""Between two words of a worker to the launcher."""
HOST = torch.device("cpu")


def owners_of(size: int) -> list[list[ValueRun]]:
    """Return who owns which numbers; with another number of workers, other ones."""
    return [[ValueRun(0, rank * VALUES // size, (rank + 1) * VALUES // size)] for rank in range(size)]


def advance(values: Tensor, start: int, step: int) -> Tensor:
    """Return numbers after a step; each depends on all steps before."""
    return (values * 31 + torch.arange(start, start + len(values)) + step) % 1000003


def expected(steps: int) -> Tensor:
    """Return all numbers at the end of an undisturbed job."""
    values = torch.zeros(VALUES, dtype=torch.int64)
    for step in range(steps):
        values = advance(values, 0, step)
    return values


class EpochTeam(Team):
    """The team of one epoch; it meets in the store of that epoch's first worker."""

    def __init__(self, seat: Seat) -> None:
        self.rank, self.size, self.timeout_s = seat.rank, seat.size, TIMEOUT_S
        self._mail = None
        self.membership = Membership.unnamed(range(seat.size))
        self._introduce(f"{seat.epoch}/hello")

    @property
    def is_nccl(self) -> bool:
        return False


class EpochStores:
    """A store for each epoch, which is in the first part of a key."""

    def __init__(self) -> None:
        self._stores: dict[str, SimulatedStore] = {}

    def open(self, epoch: int, owner: Process) -> None:
        self._stores[str(epoch)] = SimulatedStore(owner)

    def set(self, key: str, value: str) -> None:
        self._stores[key.split("/")[0]].set(key, value)

    def get(self, key: str) -> bytes:
        return self._stores[key.split("/")[0]].get(key)

    def check(self, keys: list[str]) -> bool:
        return self._stores[keys[0].split("/")[0]].check(keys)


@dataclass(eq=False)
class Spread:
    """Numbers of which each worker has its own; stands for a model whose optimizer's state is."""

    rank: int
    size: int
    values: Tensor | None = None
    inheritance: Inheritance | None = None

    @property
    def is_inheriting(self) -> bool:
        return self.inheritance is not None

    def run_states(self) -> list[RunState] | None:
        if self.values is None:
            return None
        (run,) = owners_of(self.size)[self.rank]
        return [RunState(run, {"value": self.values})]

    def inherit(self, inheritance: Inheritance) -> None:
        self.inheritance = inheritance

    def step(self, number: int) -> None:
        """Take a step, with the state of earlier owners if there were any. Collective then."""
        wanted = owners_of(self.size)
        (run,) = wanted[self.rank]
        if self.inheritance is not None:
            # Alone, a worker has all shards, and nobody to hear from.
            team: Any = self.inheritance.team or SimpleNamespace(rank=0, size=1, mail=mock.Mock())
            (entry,) = deal(self.inheritance, team, wanted, [HOST])
            self.values, self.inheritance = entry["value"], None
        elif self.values is None:
            self.values = torch.zeros(run.stop - run.start, dtype=torch.int64)
        self.values = advance(self.values, run.start, number)


@dataclass(eq=False)
class Worker:
    """One simulated worker, from its start to its death."""

    number: int
    process: Process
    job: MemberJob
    seat: Seat | None = None
    port: int = 0
    """Not 0: it waits for a seat."""
    epoch: int = NEVER
    is_wanted: bool = False
    """Others wait to join, and the epoch should end with the step under way."""
    spread: Spread | None = None
    kept: Kept | None = None
    replicator: Replicator = field(default_factory=lambda: Replicator(1))

    def live(self) -> None:
        """Train until the end, in one epoch after the other."""
        world = self.job.world
        self.replicator.count = self.job.copies
        while True:
            self.seat, self.port = None, 1
            while self.seat is None:
                world.sleep(BEAT_S)
            seat, self.port, self.epoch, self.is_wanted = self.seat, 0, self.seat.epoch, False
            team: EpochTeam | None = None
            try:
                team = EpochTeam(seat) if seat.size > 1 else None
                self._train(seat, team)
                break
            except (PoseidonError, RuntimeError) as error:
                world.note(f"worker {self.number} leaves epoch {seat.epoch}: {error}")
                if team is not None:
                    team.drop(error)
        self.job.finished.add(self.number)
        self.process.kill()

    def _train(self, seat: Seat, team: EpochTeam | None) -> None:
        spread = self.spread = Spread(seat.rank, seat.size)
        staged = self.replicator.staged
        mine = Stock.of(self.kept, None, {}, staged)
        agreed = agree([mine] if team is None else [Stock.read(one) for one in team.gather_json(mine.facts())])
        if agreed.lost:
            self.job.give_up(agreed)
        self.replicator.forget()
        done = max(0, agreed.newest)
        shards = agreed.shards_of(self.kept, staged)
        hand_on(team, agreed.sources, shards)
        self.kept = Kept(done, {}, {}, {}, shards, dict(agreed.dealt)) if agreed.newest >= 0 else None
        self.replicator.staged = None
        while done < self.job.steps:
            spread.step(done)
            done += 1
            before = self.kept
            if team is None:
                # As Checkpoint does for one worker: it has everything, so nothing is spread.
                self.kept = Kept(done, {}, {}, {}, *self.job.alone(self, seat))
            else:
                fresh = self.replicator.stage(team, seat.epoch, done, before)
                self.kept = Kept(done, {}, {}, {}, fresh.shards, fresh.dealt)
                self.replicator.recycle(before)
            self.job.completed(self, done, seat.epoch)
            if self.is_wanted:
                raise WorkerLostError("others join")
        if team is not None:
            team.gather_ints([done], "all workers to finish")
        # With the replicas: somebody may die now.
        assert self.kept is not None
        for copy in self.kept.shards:
            (run,) = owners_of(self.kept.dealt[0].shards)[copy.number]
            self.job.results[run] = copy.row.view(torch.int64)


class MemberJob:
    """The launcher, as far as membership goes, and what is noted of the workers."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world = world
        self.steps = chance.randint(3, 6)
        self.copies = chance.choice((1, 1, 2))
        self.workers: list[Worker] = []
        self.finished: set[int] = set()
        self.has_lost_shards = False
        self.results: dict[ValueRun, Tensor] = {}
        self.wrong: list[str] = []
        self.deaths = self.epochs = 0
        self._replacements = chance.randint(0, 2)
        self._done: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By step: workers that have called it complete, and the epochs."""
        self._holders: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        """By step, epoch and number: who has had a shard."""
        self._roster = Roster(Bounds(1, 4))
        world.store = self._stores = EpochStores()
        self._process = world.process("launcher", "10.0.0.100")
        for _ in range(chance.randint(2, 4)):
            self._start()
        self.task = world.spawn(self._process, "launcher", self._watch)

    def sharded_members(self) -> dict[int, Spread]:
        """Return what the worker that asks has."""
        (mine,) = [each for each in self.workers if each.process is here().running.process]
        assert mine.spread is not None
        return {0: mine.spread}

    def alone(self, worker: Worker, seat: Seat) -> tuple[list[Any], dict[int, Any]]:
        """Return what one worker alone keeps."""
        assert worker.spread is not None
        states = worker.spread.run_states()
        assert states is not None
        copy = pack((0, 0, seat.epoch), states)
        return [copy], {0: Dealt(seat.epoch, 1)}

    def completed(self, worker: Worker, step: int, epoch: int) -> None:
        """Note that a worker has called a step complete."""
        assert worker.kept is not None
        for copy in worker.kept.shards:
            self._holders[step, copy.epoch, copy.number].add(worker.number)
        for other, earlier in self._done[step]:
            if earlier != epoch and other in self.alive:
                self.wrong.append(
                    f"step {step} was complete on worker {other} in epoch {earlier}, and again in {epoch}"
                )
        self._done[step].append((worker.number, epoch))

    def give_up(self, agreed: Agreement) -> None:
        """End the job, since shards are lost: all who had them must have died, or have come to the end."""
        for member, number in agreed.lost:
            epoch = agreed.dealt[member].epoch
            living = self._holders[agreed.newest, epoch, number] & set(self.alive)
            if living or (self.deaths < 2 and not self.finished):
                self.wrong.append(f"shard {number} is lost after {self.deaths} deaths, and {living} had it")
        self.has_lost_shards = True
        self.world.sleep(LIMIT_S)

    def kill(self, count: int) -> None:
        """Kill some workers at once, but never the last one."""
        for number in self.world.random.sample(self.alive, max(0, min(count, len(self.alive) - 1))):
            self.world.note(f"worker {number} dies")
            self.deaths += 1
            self.workers[number].process.kill()

    @property
    def alive(self) -> list[int]:
        return [each.number for each in self.workers if not each.process.is_dead]

    def _start(self) -> None:
        number = len(self.workers)
        worker = Worker(number, self.world.process(f"worker{number}", f"10.0.0.{number + 1}"), self)
        self.workers.append(worker)
        self._roster.add(number, number, 0, worker.process.ip)
        worker.process.on_death.append(lambda: self._note_death(number))
        self.world.spawn(worker.process, "main", worker.live)

    def _note_death(self, number: int) -> None:
        def tell() -> None:
            has_finished = number in self.finished
            self._roster.end(number, has_finished)
            if not has_finished and self._replacements > 0 and not self.finished:
                self._replacements -= 1
                self._start()

        self.world.at(self.world.now + self.world.random.uniform(0.001, 0.1), tell)

    def _watch(self) -> None:
        world = self.world
        while not self._roster.is_done and not self.has_lost_shards:
            for number in self.alive:
                worker = self.workers[number]
                self._roster.hear(number, {"epoch": worker.epoch, "port": worker.port}, world.now)
            for decision in self._roster.decide(world.now):
                if isinstance(decision, EpochOver) and not decision.is_soft:
                    # Their connections are cut, so that nobody waits for somebody who has left.
                    for number in decision.workers:
                        self._cut(self.workers[number], decision.epoch)
                elif isinstance(decision, EpochOver):
                    for number in decision.workers:
                        self.workers[number].is_wanted = True
                elif isinstance(decision, Seated):
                    self.epochs += 1
                    first = next(iter(decision.seats))
                    self._stores.open(self._roster.epoch, self.workers[first].process)
                    for number, seat in decision.seats.items():
                        self.workers[number].seat = seat
            world.sleep(BEAT_S)
        for worker in self.workers:
            worker.process.kill()

    def _cut(self, worker: Worker, epoch: int) -> None:
        if worker.epoch == epoch and not worker.port:
            network = network_of(self.world)
            for other in self.workers:
                for end in network.between(worker.process.ip, other.process.ip):
                    if not end.error and not end.other.is_gone:
                        end.reset(is_told=True)


@dataclass
class MemberOutcome:
    """What came of one seed."""

    seed: int
    wrong: list[str]
    deaths: int
    epochs: int
    moves: int
    has_lost_shards: bool
    trace: list[str]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.deaths} deaths, {self.epochs} epochs: {'; '.join(self.wrong) or 'ok'}"


def run_members(seed: int, keep_trace: bool = False) -> MemberOutcome:
    """Run one elastic job, with deaths at random moments; the same seed always does the same."""
    chance = random.Random(seed)
    plan = draw_plan(chance)
    with mock.patch.dict(os.environ, plan.wire), simulated(), World(seed, keep_trace=keep_trace) as world:
        job = MemberJob(world, chance)
        for _ in range(chance.randint(1, 3)):
            count = chance.choice((1, 1, 1, 2))
            world.at_move(chance.randrange(1, 500 * len(job.workers)), lambda count=count: job.kill(count))
        with mock.patch.object(replicas, "sharded_members", job.sharded_members):
            is_over = world.run([job.task], LIMIT_S)
        wrong = list(job.wrong)
        if not is_over:
            wrong.append(f"{world.problem}; workers {job.alive} still run")
        if is_over and not job.has_lost_shards:
            found = torch.cat([values for _, values in sorted(job.results.items())] or [torch.zeros(0)])
            if not torch.equal(found, expected(job.steps)):
                wrong.append(f"the numbers at the end are {found.tolist()}")
        wrong += [f"{name} of {process} died of {error!r}" for process, name, error in world.crashes]
        return MemberOutcome(seed, wrong, job.deaths, job.epochs, world.moves, job.has_lost_shards, world.trace)
