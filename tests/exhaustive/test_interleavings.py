"""All orders in which three workers' steps and messages can happen, for small tables: the bound and own writes hold.

A table with one row has a column per worker, and every worker adds 1 to its own column in each clock: what a worker
reads tells which updates it saw. Whether it may read, and what it would, is checked in every state.

A move is one step of a worker together with the arrival of the message it sends, or the arrival of a reply. Nothing is
lost by joining the first two: whatever the order in which a server receives messages, moving each worker's steps to
the moments of their arrival keeps the order of events at the server and at every worker, and replies may still be
arbitrarily late. States reached in several ways are explored once.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest

from poseidon.tables.cache import TableCache
from poseidon.tables.clocks import Clocks
from poseidon.tables.rows import DenseRows, Patch
from poseidon.tables.tables import Reply, TableServer, TableSpec

ROW = np.zeros(1, np.int64)
OWNED = {TableCache, TableServer, Clocks, DenseRows}
WITHOUT_EFFECT = {"staleness_seen", "_arrived"}
"""Attributes that no later move depends on: the first only counts, the second matters to ASP alone."""


class World:
    """Workers, one server and the replies between them.

    If ``joined``, an update and its clock arrive together, and workers finish their first steps in the order of their
    numbers: they all do the same, so any other run is one of these with the workers renamed.
    """

    def __init__(self, workers: int, clocks: int, spec: TableSpec, joined: bool = False) -> None:
        self.clocks = clocks
        self.joined = self.ordered = joined
        self.bound = spec.model.bound
        self.server = TableServer(spec, range(workers))
        self.caches = [TableCache(spec) for _ in range(workers)]
        self.replies: list[deque[Reply]] = [deque() for _ in range(workers)]
        self.has_written = [False] * workers
        self.lost: set[int] = set()
        self.keys: dict[Any, Any] = {}

    def moves(self) -> list[tuple[str, int]]:
        """Return what may happen next; a worker that can only wait gets its reply first, as nobody else sees that."""
        moves = []
        for worker, cache in enumerate(self.caches):
            step = self._next_step(worker, cache)
            if self.replies[worker]:
                if step is None:
                    return [("reply", worker)]
                moves.append(("reply", worker))
            if step and not (self.ordered and step == "inc" and self._is_out_of_turn(worker)):
                moves.append((step, worker))
        return moves

    def _next_step(self, worker: int, cache: TableCache) -> str | None:
        if worker in self.lost or cache.clock == self.clocks:
            return None
        if self.has_written[worker]:
            return "clock"
        if not len(cache.stale(ROW)):
            return "inc"
        return None if cache._asked[0] else "get"

    def _is_out_of_turn(self, worker: int) -> bool:
        return worker > 0 and self.caches[worker].clock == 0 == self.caches[worker - 1].clock

    def make(self, move: tuple[str, int]) -> None:
        kind, worker = move
        cache = self.caches[worker]
        if kind == "reply":
            cache.receive(0, self.replies[worker].popleft())
        elif kind == "get":
            [(_, rows)] = cache.ask(ROW)
            self._send(self.server.get(worker, cache.clock, rows))
        elif kind == "inc":
            cache.inc(Patch(ROW, np.eye(len(self.caches), dtype=np.int64)[worker : worker + 1]))
            [(_, patch)] = cache.take_updates()
            self.server.inc(worker, patch)
            self.has_written[worker] = True
            if self.joined:
                self._tick(worker)
        else:
            self._tick(worker)

    def _tick(self, worker: int) -> None:
        self._send(self.server.clock(worker, self.caches[worker].tick()))
        self.has_written[worker] = False

    def lose(self, worker: int) -> None:
        self.lost.add(worker)
        self.replies[worker].clear()
        self._send(self.server.lose(worker))

    def check(self) -> None:
        """Check all that must hold in every state."""
        clocks = [cache.clock for worker, cache in enumerate(self.caches) if worker not in self.lost]
        for worker, cache in enumerate(self.caches):
            seen = cache._visible.take(ROW).values[0]
            if worker in self.lost:
                continue
            # Every worker may finish the step it was let into, so its clock may be one more than it may read at.
            assert self.bound is None or cache.clock - min(clocks) <= self.bound + 1
            if cache._fresh[0] >= 0:
                assert seen[worker] == cache.clock + self.has_written[worker]
            if not len(cache.stale(ROW)):
                self._check_readable(worker, cache, seen)

    def _check_readable(self, worker: int, cache: TableCache, seen: Any) -> None:
        assert self.bound is None or cache.clock - cache._fresh[0] <= self.bound
        for other, theirs in enumerate(self.caches):
            if other == worker or other in self.lost:
                continue
            assert seen[other] <= theirs.clock + self.has_written[other]
            if self.bound is not None:
                assert cache.clock - theirs.clock <= self.bound
                assert seen[other] >= cache.clock - self.bound
            if cache.spec.consistency == "bsp":
                assert seen[other] == cache.clock

    def _send(self, replies: list[Reply]) -> None:
        for reply in replies:
            self.replies[reply.worker].append(reply)

    # What exploring asks for: copies and keys of only what a move can change.

    def fork(self, worker: int, with_server: bool) -> World:
        twin = copy.copy(self)
        twin.caches = [clone(cache) if w == worker else cache for w, cache in enumerate(self.caches)]
        twin.replies = [deque(queue) for queue in self.replies]
        twin.has_written = list(self.has_written)
        twin.keys = dict(self.keys)
        twin.keys.pop(worker, None)
        if with_server:
            twin.server = clone(self.server)
            twin.keys.pop("server", None)
        return twin

    def key(self) -> Any:
        parts: dict[Any, Any] = {"server": self.server, **dict(enumerate(self.caches))}
        for name, part in parts.items():
            if name not in self.keys:
                self.keys[name] = freeze(part)
        return (*[self.keys[name] for name in parts], *self.has_written, freeze(self.replies))


def clone(thing: Any) -> Any:
    """Copy what changes in place, share the rest; many times faster than ``deepcopy``."""
    kind = type(thing)
    if kind is np.ndarray:
        return thing.copy()
    if kind in OWNED:
        twin = object.__new__(kind)
        twin.__dict__ = {name: clone(value) for name, value in thing.__dict__.items()}
        return twin
    if kind is dict or kind is Counter:
        return kind({key: clone(value) for key, value in thing.items()})
    if kind is list or kind is deque or kind is set:
        return kind(map(clone, thing))
    return thing


def freeze(thing: Any) -> Any:
    """Return a value that is equal for things with the same future."""
    kind = type(thing)
    if kind is np.ndarray:
        # How much a row changed only decides what is sent first; here there is one row.
        return (thing > 0).tobytes() if thing.dtype == np.float64 else thing.tobytes()
    if kind in OWNED:
        return tuple([freeze(value) for name, value in thing.__dict__.items() if name not in WITHOUT_EFFECT])
    if kind is dict:
        return tuple([(key, freeze(thing[key])) for key in sorted(thing)])
    if kind is list or kind is deque or kind is tuple:
        return tuple(map(freeze, thing))
    if kind is Patch:
        return thing.values.tobytes()
    if kind is Reply:
        return (thing.patch.values.tobytes(), thing.fresh, thing.included, thing.is_push)
    return frozenset(thing) if kind is set else thing


def explore(start: World) -> int:
    """Check every state that can be reached, and that each can only end with all work done; return their number."""
    seen, todo = {start.key()}, [start]
    while todo:
        state = todo.pop()
        state.check()
        moves = state.moves()
        if not moves:
            assert {c.clock for w, c in enumerate(state.caches) if w not in state.lost} == {state.clocks}
        for kind, worker in moves:
            after = state.fork(worker, with_server=kind != "reply")
            after.make((kind, worker))
            key = after.key()
            if key not in seen:
                seen.add(key)
                todo.append(after)
    return len(seen)


def test_a_broken_bound_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_at_once(self: TableServer, worker: int, clock: int, rows: Any) -> list[Reply]:
        return [Reply(worker, self.rows.take(rows), clock, self._applied[worker])]

    monkeypatch.setattr(TableServer, "get", answer_at_once)
    with pytest.raises(AssertionError):
        explore(World(2, 2, TableSpec("t", 1, 2, "int64", "bsp", eager=False)))


def test_a_lost_own_write_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = TableCache.receive

    def forget(self: TableCache, place: int, reply: Reply) -> None:
        self._sent[place].clear()
        receive(self, place, reply)

    monkeypatch.setattr(TableCache, "receive", forget)
    with pytest.raises(AssertionError):
        explore(World(2, 3, TableSpec("t", 1, 2, "int64", "ssp", 1)))


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("consistency", "staleness"), [("bsp", 0), ("ssp", 0), ("ssp", 1), ("ssp", 2)])
def test_three_workers_and_clocks_in_all_orders(consistency: str, staleness: int, eager: bool) -> None:
    spec = TableSpec("t", 1, 3, "int64", consistency, staleness, eager=eager)
    assert explore(World(3, 3, spec, joined=True)) > 50


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("consistency", "staleness"), [("bsp", 0), ("ssp", 0), ("ssp", 1), ("ssp", 2), ("asp", 0)])
def test_two_workers_with_updates_ahead_of_their_clocks_in_all_orders(
    consistency: str, staleness: int, eager: bool
) -> None:
    spec = TableSpec("t", 1, 2, "int64", consistency, staleness, eager=eager)
    # Without a bound a worker runs through while the other's replies pile up: two clocks have orders enough.
    assert explore(World(2, 2 if consistency == "asp" else 3, spec)) > 30


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("dies_after", [0, 1, 4, 7, 11])
def test_the_others_finish_in_all_orders_after_a_death(dies_after: int, staleness: int, eager: bool) -> None:
    world = World(3, 2, TableSpec("t", 1, 3, "int64", "ssp", staleness, eager=eager), joined=True)
    world.ordered = False
    generator = random.Random(dies_after)
    for _ in range(dies_after):
        world.make(generator.choice(world.moves()))
    world.lose(2)
    assert explore(world) > 1
    assert world.server.clocks.losses.keys() == {2}


@pytest.mark.parametrize("seed", range(60))
def test_larger_jobs_in_random_orders(seed: int) -> None:
    generator = random.Random(seed)
    workers, clocks, bound = generator.randint(2, 9), generator.randint(3, 12), generator.randint(0, 6)
    consistency = generator.choice(["bsp", "ssp", "ssp", "asp"])
    spec = TableSpec(
        "t", 1, workers, "int64", consistency, bound if consistency == "ssp" else 0, eager=generator.random() < 0.7
    )
    world = World(workers, clocks, spec)
    # Some workers and connections are much slower than others.
    pace = {(kind, w): generator.random() ** 3 for kind in ("get", "inc", "clock", "reply") for w in range(workers)}
    while moves := world.moves():
        world.make(generator.choices(moves, [pace[move] + 1e-6 for move in moves])[0])
        world.check()
    assert {cache.clock for cache in world.caches} == {clocks}
