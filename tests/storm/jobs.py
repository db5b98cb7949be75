"""What the simulated workers do: Poseidon's own code, from the engine to the bytes, for a few steps.

Real: the engine, the sharded route, the sums server, the tables, the wire, the mesh, the watch, the launcher's verdict.
Simulated: processes, threads, clocks, sockets, the job's store. Left out: gloo and NCCL.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from poseidon import ps
from poseidon.engine.discover import find_units
from poseidon.engine.engine import Engine
from poseidon.engine.hooks import AutogradFrontEnd
from poseidon.engine.options import Options
from poseidon.engine.policy import UpdateNow
from poseidon.engine.update import DeferredUpdates
from poseidon.launch import protocol
from poseidon.launch.cause import Death
from poseidon.launch.places import Place
from poseidon.launch.watching import Watching
from poseidon.planning.cluster import Cluster
from poseidon.planning.route import Routes
from poseidon.routes.catalogue import ShardedRoute
from poseidon.routes.sharded import ShardedExchanger
from poseidon.tables.node import Node
from poseidon.team.membership import Membership
from poseidon.team.team import Team
from poseidon.team.wiring import connect_wire
from storm.network import network_of
from storm.world import Process, Task, World, here

TIMEOUT_S = 20.0
"""How long workers wait for each other."""
STORE_S = 30.0
"""How long the job's store may take to answer."""
HANG_S = 70.0
"""A job in which nothing moves for so long is ended: ``poseidon run --hang-timeout``."""
_WAITS = (
    "Thread 0x1 (most recent call first):",
    '  File "/poseidon/team/team.py", line 1 in wait',
    "  File x in <module>",
)
"""What a worker that waits for others prints when the launcher asks for its stack."""


class SimulatedStore:
    """The job's store, which worker 0 holds: without it, nobody gets an answer."""

    def __init__(self, owner: Process) -> None:
        self._owner = owner
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._ask()
        self._values[key] = value

    def get(self, key: str) -> bytes:
        world = here()
        deadline = world.now + STORE_S
        self._ask()
        while key not in self._values:
            if world.now > deadline:
                raise RuntimeError(f"the store has no {key} after {STORE_S:g} s")
            world.sleep(0.05)
            self._ask()
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._ask()
        return all(key in self._values for key in keys)

    def _ask(self) -> None:
        world = here()
        world.sleep(world.random.uniform(50e-6, 500e-6))
        deadline = world.now + STORE_S
        dark = network_of(world).dark
        asker = world.running.process
        while not self._owner.is_dead:
            is_cut = asker is not self._owner and {asker.ip, self._owner.ip} & dark
            if not is_cut and not self._owner.is_paused:
                return
            if world.now > deadline:
                raise RuntimeError("DistNetworkError: the store did not answer")
            world.sleep(0.5)
        raise RuntimeError("DistNetworkError: failed to recv, got 0 bytes")


class SimulatedTeam(Team):
    """A team that is told its rank instead of asking torch.distributed for it; all else is the real one's."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.timeout_s = rank, size, TIMEOUT_S
        self._mail = None
        self.membership = Membership.unnamed(range(size))
        self._introduce("team/hello")

    @property
    def is_nccl(self) -> bool:
        return False


@dataclass(frozen=True)
class Plan:
    """What a job does, drawn from a seed."""

    kind: str
    workers: int
    steps: int
    wire: dict[str, str]
    """Settings of the wire, as environment variables."""
    detail: int
    """Chooses between the variants of a kind."""


KINDS = ("sums", "sums", "engine", "tables", "stale")


def draw_plan(chance: Any) -> Plan:
    """Draw a job."""
    wire = {
        "POSEIDON_WIRE_STREAMS_PER_PEER": str(chance.choice((1, 1, 2, 3))),
        "POSEIDON_WIRE_PAYLOAD_CHECKSUM": "1",
        "POSEIDON_SECRET": "a secret that all workers know",
        "POSEIDON_WIRE_BALANCE": chance.choice("01"),
        "POSEIDON_WIRE_CAP_MBIT": chance.choice(("0", "0", "200")),
        "POSEIDON_WIRE_LOST_AFTER_S": "6",
        "POSEIDON_WIRE_CONNECT_TIMEOUT_S": "10",
        "POSEIDON_WIRE_CLOSE_TIMEOUT_S": "3",
    }
    return Plan(chance.choice(KINDS), chance.choice((2, 2, 3, 4)), chance.randint(1, 4), wire, chance.randrange(6))


# Sums: gradients of random sizes through the parameter server.

SUM_CHUNK_BYTES = 1024


def part_of(rank: int, step: int, number: int, size: int) -> torch.Tensor:
    """Return values of which another order of additions would give other bits."""
    generator = np.random.default_rng([rank, step, number])
    return torch.from_numpy((generator.standard_normal(size) * 10.0 ** generator.integers(-3, 4)).astype(np.float32))


def sum_sizes(plan: Plan) -> list[int]:
    """Return how many values each gradient has."""
    return [(5, 700, 3000)[(plan.detail + each) % 3] for each in range(1 + plan.detail % 3)]


def do_sums(plan: Plan, rank: int) -> list[bytes]:
    """Average gradients; return their bits."""
    sizes = sum_sizes(plan)
    found = []
    with closing_all() as opened:
        team = opened(SimulatedTeam(rank, plan.workers))
        context = SimpleNamespace(team=team, is_cuda=False, cluster=Cluster(plan.workers))
        exchanger = opened(ShardedExchanger(context, chunk_bytes=SUM_CHUNK_BYTES))  # type: ignore[arg-type]
        slots = exchanger.book(sizes, [torch.float32] * len(sizes))
        for step in range(plan.steps):
            team.watch.note(step, "in backward")
            values = [part_of(rank, step, number, size) for number, size in enumerate(sizes)]
            under_way = [
                exchanger.average(flat, slot, step, f"bucket {slot.number}")
                for flat, slot in zip(values, slots, strict=True)
            ]
            for exchange in under_way:
                exchange.finish(True)
            found.append(b"".join(flat.numpy().tobytes() for flat in values))
        team.gather_ints([plan.steps], "the end")
    return found


def expect_sums(plan: Plan) -> list[bytes]:
    """Return what every worker must have."""
    expected = []
    for step in range(plan.steps):
        means = []
        for number, size in enumerate(sum_sizes(plan)):
            parts = [part_of(rank, step, number, size).numpy() for rank in range(plan.workers)]
            total = parts[0].copy()
            for part in parts[1:]:
                total += part
            means.append((torch.from_numpy(total) / plan.workers).numpy().tobytes())
        expected.append(b"".join(means))
    return expected


# Engine: a small net, trained.


def make_net() -> nn.Sequential:
    """Return the same net every time."""
    generator = torch.Generator().manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return net


def batch(rank: int, step: int) -> torch.Tensor:
    """Return a worker's input."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


class FirstRoute(ShardedRoute):
    """Carries the first backward, as allreduce does where there is gloo."""

    name = "first"


def do_engine(plan: Plan, rank: int) -> list[bytes]:
    """Train; return the bits of the parameters."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    defers = plan.detail % 2 == 1
    with closing_all() as opened:
        team = opened(SimulatedTeam(rank, plan.workers))
        options = Options((1, 200, None)[plan.detail % 3], routes={"*": "sharded"}, defers=defers, check_interval=2)
        routes = Routes([FirstRoute(offered=True, chunk_bytes=64), ShardedRoute(chunk_bytes=64)])
        engine = Engine(find_units(net), team, Cluster(plan.workers), options, routes)
        policy = DeferredUpdates(optimizer) if defers else UpdateNow()
        policy.connect(net, engine)
        opened(policy)
        moments = SimpleNamespace(begin_backward=policy.begin_backward, end_backward=policy.end_backward)
        front_end = opened(AutogradFrontEnd(engine, moments))  # type: ignore[arg-type]
        for step in range(plan.steps + 1):
            inputs = batch(rank, step)
            policy.before_forward(net, True, False)
            engine.arm(True, inputs.numel())
            outputs = net(inputs)
            front_end.watch_outputs([outputs], [])
            optimizer.zero_grad()
            outputs.square().mean().backward()
            optimizer.step()
        policy.finish()
        return [parameter.detach().numpy().tobytes() for parameter in net.parameters()]


def expect_engine(plan: Plan) -> list[bytes]:
    """Return the parameters that one process finds with the mean of all gradients."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(plan.steps + 1):
        means: list[torch.Tensor] = []
        for rank in range(plan.workers):
            optimizer.zero_grad()
            net(batch(rank, step)).square().mean().backward()
            grads = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
            means = grads if not means else [mean + grad for mean, grad in zip(means, grads, strict=True)]
        for parameter, mean in zip(net.parameters(), means, strict=True):
            parameter.grad = mean / plan.workers
        optimizer.step()
    return [parameter.detach().numpy().tobytes() for parameter in net.parameters()]


# Tables: rows that all workers read and add to.

ROWS, WIDTH = 6, 3


def change(rank: int, step: int, is_exact: bool) -> np.ndarray[Any, Any]:
    """Return what a worker adds in a step: whole numbers where changes may be added in any order."""
    if is_exact:
        return np.full((ROWS, WIDTH), 8.0**rank, np.float64)
    return np.random.default_rng([rank, step]).standard_normal((ROWS, WIDTH)).astype(np.float32)


def do_tables(plan: Plan, rank: int) -> list[bytes]:
    """Add to a table in lockstep; return the bits of its rows after every clock."""
    found = []
    with opened_tables(plan, rank) as job:
        table = job.table("rows", ROWS, WIDTH, eager=plan.detail % 2 == 0, managed=plan.detail == 3)
        for step in range(plan.steps + 1):
            found.append(table.get(range(ROWS)).tobytes())
            table.inc(range(ROWS), change(rank, step, False))
            table.clock()
        found.append(table.get(range(ROWS)).tobytes())
    return found


def expect_tables(plan: Plan) -> list[bytes]:
    """Return the rows after every clock, with changes added in rank order."""
    rows = np.zeros((ROWS, WIDTH), np.float32)
    found = [rows.tobytes()]
    for step in range(plan.steps + 1):
        for rank in range(plan.workers):
            rows = rows + change(rank, step, False)
        found.append(rows.tobytes())
    return found


def do_stale(plan: Plan, rank: int) -> list[bytes]:
    """Add to a table with bounded staleness, which goes on without workers that die; return how often each added."""
    with opened_tables(plan, rank) as job:
        table = job.table("rows", ROWS, WIDTH, "float64", consistency="ssp", staleness=1, eager=plan.detail % 2 == 0)
        for step in range(plan.steps + 1):
            table.get(range(ROWS))
            table.inc(range(ROWS), change(rank, step, True))
            assert table.clock() == step + 1
        seen = table.get(range(ROWS))
        mine = seen // 8.0**rank % 8.0
        assert (mine == plan.steps + 1).all() or job.losses, f"worker {rank} does not see its own changes: {seen}"
        return [str(sorted(job.losses)).encode()]


def expect_stale(_plan: Plan) -> list[bytes]:
    """Return what workers say where nobody was lost."""
    return [b"[]"]


@contextlib.contextmanager
def opened_tables(plan: Plan, rank: int) -> Iterator[ps.TableJob]:
    """Join the others as ``poseidon.ps.connect`` does."""
    team = SimulatedTeam(rank, plan.workers)
    try:
        transport = connect_wire(team, range(team.size))
        watch = team.watch
        node = Node(transport, timeout_s=TIMEOUT_S, is_busy=watch.is_busy, look=watch.look, is_started=False)
        job = ps.TableJob(node, transport, team.close)
    except BaseException:
        team.close()
        raise
    try:
        team.gather_ints([0], "the start of the tables")
        node.start()
        watch.listen_lost(node.lose_connection)
    except BaseException as error:
        job.__exit__(type(error), error, None)
        raise
    with job:
        yield job


@contextlib.contextmanager
def closing_all() -> Iterator[Callable[[Any], Any]]:
    """Close everything that was opened, the latest first, as scripts do at their end."""
    with contextlib.ExitStack() as stack:

        def opened(thing: Any) -> Any:
            stack.callback(thing.close)
            return thing

        yield opened


JOBS: dict[str, tuple[Callable[[Plan, int], list[bytes]], Callable[[Plan], list[bytes]]]] = {
    "sums": (do_sums, expect_sums),
    "engine": (do_engine, expect_engine),
    "tables": (do_tables, expect_tables),
    "stale": (do_stale, expect_stale),
}


def usual_moves(plan: Plan) -> int:
    """Return about how many moves a job makes without a fault, so that faults come at any time of it."""
    others, pairs = plan.workers - 1, plan.workers * (plan.workers - 1) // 2
    if plan.kind == "sums":
        chunks = sum(math.ceil(4 * size / SUM_CHUNK_BYTES) for size in sum_sizes(plan))
        return (280 + (30 + 35 * chunks) * plan.steps) * others
    if plan.kind == "engine":
        return (800 + 400 * plan.steps) * others
    return (550 + 130 * plan.steps) * pairs


class Launcher:
    """Starts the workers, hears how they end, and names the cause, as ``poseidon run`` does."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.results: dict[int, list[bytes]] = {}
        self.errors: dict[int, BaseException] = {}
        self.ended_at: dict[int, float] = {}
        self.verdict: Death | None = None
        self.verdict_at = 0.0
        self.workers = [world.process(f"worker{rank}", f"10.0.0.{rank + 1}") for rank in range(plan.workers)]
        places = [Place(rank, rank, 0, 1, f"host{rank}") for rank in range(plan.workers)]
        self._watching = Watching(places, hang_timeout_s=HANG_S, now=world.now)
        world.store = SimulatedStore(self.workers[0])
        self._heard = [world.now] * plan.workers
        self._process = world.process("launcher", "10.0.0.100")
        for rank, process in enumerate(self.workers):
            process.on_death.append(lambda rank=rank: self._note_death(rank))
            world.spawn(process, "main", lambda rank=rank: self._work(rank))
        self.task: Task = world.spawn(self._process, "launcher", self._watch)

    def _work(self, rank: int) -> None:
        work = JOBS[self.plan.kind][0]
        try:
            self.results[rank] = work(self.plan, rank)
        except Exception as error:
            self.errors[rank] = error
            self.world.note("".join(traceback.format_exception(error)))
        # The process ends with its main thread; its agent tells the launcher.
        self.workers[rank].kill()

    def _note_death(self, rank: int) -> None:
        """Let the worker's agent report how it ended, if it can."""
        world = self.world
        self.ended_at[rank] = world.now
        error = self.errors.get(rank)
        status = 0 if rank in self.results else 1 if error is not None else -9
        lines = [] if error is None else "".join(traceback.format_exception(error)).splitlines()

        def tell() -> None:
            if self.workers[rank].ip not in network_of(world).dark:
                for line in lines:
                    self._watching.read_line(rank, line, True, world.now)
                self._watching.exited(rank, status, world.now)

        world.at(world.now + world.random.uniform(0.001, 0.1), tell)

    def _show_stacks(self) -> None:
        self._watching.note_hang(self.world.now)
        for rank, process in enumerate(self.workers):
            if not process.is_dead and not process.is_paused:
                for line in _WAITS:
                    self._watching.read_line(rank, line, True, self.world.now)

    def _watch(self) -> None:
        world, dark = self.world, network_of(self.world).dark
        while True:
            for rank, process in enumerate(self.workers):
                if process.ip not in dark:
                    self._heard[rank] = world.now
                elif world.now - self._heard[rank] > protocol.SILENCE_S:
                    self._watching.machine_lost(rank, "no heartbeat", world.now)
            if self._watching.is_hung(world.now):
                self._show_stacks()
            self.verdict = self._watching.verdict(world.now)
            if self.verdict is not None or self._watching.is_over:
                break
            world.sleep(0.2)
        self.verdict_at = world.now
        world.note(f"the launcher says {self.verdict}")
        for process in self.workers:
            process.kill()
