"""Owners that step: weights come back instead of sums, on the in-memory network and with both arithmetics."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compact_twin import HostCompactor
from poseidon.errors import ServerError
from poseidon.routes.served import ALIGNMENT, align, runs
from poseidon.routes.shard import Order, Piece, Shard, State, read_state
from poseidon.sums import stepping
from poseidon.sums.arithmetic import Adder
from poseidon.sums.chunks import Chunk
from poseidon.sums.device import DeviceAdder, DeviceArithmetic
from poseidon.sums.encodings import Encoding
from poseidon.sums.fetching import Ask, FetchDesk
from poseidon.sums.host import host_adders
from poseidon.sums.means import DeviceMeans, HostMeans, MeanMaker
from poseidon.sums.server import SumServer
from poseidon.sums.slots import Slot, make_slots
from poseidon.sums.stepping import StepAdder, StepJob, StepThread, take_step
from poseidon.sums.touched import TouchedRows, rows_in_chunk
from poseidon.wire.formats import find_format
from poseidon.wire.memory import MemoryNetwork, MemoryTransport, make_memory_network
from sum_team import CHUNK_VALUES, KINDS, Immediately

SHAPES = [(37, 61), (1003,), (19, 50), (1,)]
SIZE = sum(torch.Size(shape).numel() for shape in SHAPES)
both = pytest.mark.parametrize("kind", KINDS)


class AtOnce(StepThread):
    """Runs steps on the caller's thread."""

    def __init__(self) -> None:
        self.lane = contextlib.nullcontext

    def put(self, priority: float, job: StepJob) -> None:
        take_step([job])


class StepWorker:
    """One rank: its model, what it owns, and its server."""

    def __init__(self, transport: MemoryTransport, kind: str, slot: Slot, is_rounded: bool = False) -> None:
        rank = transport.rank
        self.slot = slot
        generator = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.item: Any = SimpleNamespace(parameters=self.parameters)
        self.shard = Shard([(self.item, slot)], rank, set(self.parameters) if is_rounded else set())
        self.server = SumServer(transport)
        self.desk = FetchDesk(transport)
        self.kind = kind
        self.book()
        self.flat = torch.empty(0)

    def book(self) -> None:
        """Take over the slot as it is now."""
        rank, size, slot, kind = self.server._rank, self.server._transport.size, self.slot, self.kind
        inner: Adder
        means: MeanMaker
        if kind == "host":
            (inner,) = host_adders([slot], ["float32"], rank)
            means = HostMeans(inner, find_format("float32"), torch.float32, size)
        else:
            inner = DeviceAdder(slot, rank, size, DeviceArithmetic(HostCompactor(), Immediately))
            means = DeviceMeans(inner, torch.float32, size, contextlib.nullcontext)
        self.adder = StepAdder(inner, slot, rank, means, self.shard, AtOnce())
        self.server.book([(slot, self.adder)])
        self.desk.book([(slot, self.adder)])

    def start(self, gradient: Tensor, version: int) -> Any:
        self.flat = gradient.clone()
        self.future = self.server.start(self.flat.numpy() if self.kind == "host" else self.flat, self.slot, version)
        return self.future

    def take(self) -> Tensor:
        """Put the weights that have come in place, and return them."""
        outcome = self.future.result(0)
        held = [parameter.detach().view(-1) for parameter in self.parameters]
        if callable(outcome):
            outcome(torch.cat(held))
        return self.take_flat()

    def take_flat(self) -> Tensor:
        held = [parameter.detach().view(-1) for parameter in self.parameters]
        torch._foreach_copy_(held, self.flat.split([len(one) for one in held]))
        return self.flat

    def order(self, version: int, **fields: Any) -> None:
        self.adder.order(version, Order(**{"update": _adam, "in_hand": {}, **fields}))


def _adam(pieces: Sequence[Piece], state: State) -> None:
    stand_in = torch.optim.AdamW([piece.held for piece in pieces], lr=1e-2)
    stand_in.state = state
    stand_in.step()


def _team(
    kind: str, workers: int, seed: int | None = None, is_rounded: bool = False
) -> tuple[list[StepWorker], MemoryNetwork]:
    (slot,) = make_slots(0, [SIZE], [4], workers, 4 * CHUNK_VALUES)
    if kind == "host":
        slot = align(slot, [torch.Size(shape).numel() for shape in SHAPES])
    assert {chunk.owner for chunk in slot.chunks} == set(range(workers))
    order = random.Random(seed)
    transports = make_memory_network(workers, None if seed is None else lambda some: order.randrange(len(some)))
    return [StepWorker(transport, kind, slot, is_rounded) for transport in transports], transports[0].network


def _gradient(rank: int, step: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


class Reference:
    """The same training in one place."""

    def __init__(self, workers: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2)
        self._workers = workers

    def mean(self, step: int) -> Tensor:
        total = _gradient(0, step)
        for rank in range(1, self._workers):
            total = total + _gradient(rank, step)
        return total / self._workers

    def step(self, step: int) -> Tensor:
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, self.mean(step).split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer.step()
        return self.flat

    @property
    def flat(self) -> Tensor:
        return torch.cat([parameter.detach().view(-1) for parameter in self.parameters])


@both
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_weights_come_back_whatever_order_messages_take(kind: str, workers: int, seed: int | None) -> None:
    team, network = _team(kind, workers, seed)
    reference, order = Reference(workers), random.Random(seed)
    for step in range(4):
        futures = [worker.start(_gradient(rank, step), step + 1) for rank, worker in enumerate(team)]
        network.pump(limit=order.randrange(10))
        for worker in team:
            worker.order(step + 1)
            network.pump(limit=order.randrange(10))
        network.pump()
        expected = reference.step(step)
        assert all(future.done() for future in futures)
        assert all(torch.equal(worker.take(), expected) for worker in team)


@both
def test_nothing_comes_back_before_the_owner_has_the_order(kind: str) -> None:
    team, network = _team(kind, 2)
    futures = [worker.start(_gradient(rank, 0), 1) for rank, worker in enumerate(team)]
    team[1].order(1)
    network.pump()
    assert not any(future.done() for future in futures)
    team[0].order(1)
    network.pump()
    assert all(future.done() for future in futures)


@both
def test_an_order_may_leave_weights_as_they_are_and_use_gradients_in_hand(kind: str) -> None:
    team, network = _team(kind, 2)
    before = Reference(2).flat
    for rank, worker in enumerate(team):
        worker.start(_gradient(rank, 0), 1)
    for worker in team:
        worker.order(1, update=None)
    network.pump()
    assert all(torch.equal(worker.take(), before) for worker in team)
    for rank, worker in enumerate(team):
        worker.start(_gradient(rank, 1), 2)
    for worker in team:
        first, *_ = worker.parameters
        in_hand: dict[Piece, Tensor | None] = {
            piece: None if piece.parameter is first else torch.ones(piece.length) for piece in worker.shard.pieces
        }
        worker.order(2, in_hand=in_hand)
    network.pump()
    reference = Reference(2)
    for parameter in reference.parameters[1:]:
        parameter.grad = torch.ones_like(parameter)
    reference.optimizer.step()
    assert all(torch.equal(worker.take(), reference.flat) for worker in team)


def _fetch(worker: StepWorker, network: MemoryNetwork, what: Ask, version: int) -> list[memoryview]:
    futures = [worker.desk.fetch(chunk, what, version) for chunk in worker.slot.chunks]
    network.pump()
    return [future.result(0).payload for future in futures]


def _join(payloads: Sequence[memoryview]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.frombuffer(one, np.float32) for one in payloads]))


@both
def test_one_worker_fetches_means_weights_and_state(kind: str) -> None:
    team, network = _team(kind, 3, is_rounded=True)
    reference = Reference(3)
    asker = team[2]
    for rank, worker in enumerate(team):
        worker.start(_gradient(rank, 0), 1)
    early = [asker.desk.fetch(chunk, Ask.WEIGHTS, 1) for chunk in asker.slot.chunks]
    means = _fetch(asker, network, Ask.MEAN, 1)
    assert torch.equal(_join(means), reference.mean(0))
    assert not any(future.done() for future in early)
    for worker in team:
        worker.order(1)
    network.pump()
    expected = reference.step(0)
    assert torch.equal(asker.take(), expected.bfloat16().float())
    weights = [future.result(0).payload for future in early]
    assert torch.equal(_join(weights), expected)
    means = _fetch(asker, network, Ask.MEAN, 1)
    assert torch.equal(_join(means), reference.mean(0))
    full: State = {parameter: {} for parameter in asker.parameters}
    for chunk, answer in zip(asker.slot.chunks, _fetch(asker, network, Ask.STATE, 1), strict=True):
        read_state(answer, [*runs(asker.item, chunk)], full)
    for mine, theirs in zip(asker.parameters, reference.parameters, strict=True):
        state = reference.optimizer.state[theirs]
        assert full[mine].keys() == state.keys()
        assert all(torch.equal(full[mine][key], state[key]) for key in state)


@both
def test_answers_are_made_in_the_lane_of_steps_and_not_where_the_model_computes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There they would wait for the model, which may wait for a collective that the asker has yet to join.
    inside: list[str] = []
    made: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def lane() -> Iterator[None]:
        inside.append("lane")
        yield
        inside.pop()

    def noting(name: str) -> Callable[..., memoryview]:
        method = getattr(Shard, name)

        def note(*args: Any) -> memoryview:
            made.append((name, bool(inside)))
            answer: memoryview = method(*args)
            return answer

        return note

    for name in ("exact", "state_of"):
        monkeypatch.setattr(Shard, name, noting(name))
    team, network = _team(kind, 3, is_rounded=True)
    for worker in team:
        worker.adder._thread.lane = lane
    _steps(team, network, Reference(3), 1)
    for what in (Ask.WEIGHTS, Ask.STATE):
        _fetch(team[1], network, what, 1)
    assert {name for name, _ in made} == {"exact", "state_of"}
    assert all(is_inside for _, is_inside in made)


def _steps(team: list[StepWorker], network: MemoryNetwork, reference: Reference, version: int) -> Tensor:
    for rank, worker in enumerate(team):
        worker.start(_gradient(rank, version), version)
    for worker in team:
        worker.order(version)
    network.pump()
    return reference.step(version)


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Encodings of all weights that owners have made."""
    seen: list[int] = []
    encode = DeviceMeans.encode

    def noting(self: Any, chunk: Any, weights: Tensor, change: Any, then: Callable[[Any], None], fail: Any) -> None:
        def note(encoded: Any) -> None:
            seen.append(encoded.encoding)
            then(encoded)

        encode(self, chunk, weights, change, note, fail)

    monkeypatch.setattr(DeviceMeans, "encode", noting)
    return seen


def test_weights_travel_as_changes_and_now_and_then_as_they_are(
    encodings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "REFRESHED", 3)
    team, network = _team("device", 2)
    reference = Reference(2)
    for version in range(1, 8):
        encodings.clear()
        expected = _steps(team, network, reference, version)
        assert all(torch.equal(worker.take(), expected) for worker in team)
        assert set(encodings) == {Encoding.CHANGE if version % 3 else Encoding.COMPACT}


def test_rounded_weights_change_from_rounded_ones_whatever_a_worker_has_looked_at(encodings: list[int]) -> None:
    team, network = _team("device", 2, is_rounded=True)
    reference = Reference(2)
    for version in range(1, 6):
        encodings.clear()
        expected = _steps(team, network, reference, version)
        assert all(torch.equal(worker.take(), expected.bfloat16().float()) for worker in team)
        assert set(encodings) == {Encoding.ROUNDED_CHANGE}
        if version == 2:
            exact = _join(_fetch(team[1], network, Ask.WEIGHTS, version))
            assert torch.equal(exact, expected)
            team[1].flat.copy_(exact)
            team[1].take_flat()


def test_weights_that_are_no_longer_rounded_come_whole_once(encodings: list[int]) -> None:
    team, network = _team("device", 2, is_rounded=True)
    reference = Reference(2)
    expected = _steps(team, network, reference, 1)
    for worker in team:
        worker.take()
        for chunk in worker.slot.chunks:
            worker.shard.stop_rounding(chunk)
    for version, encoding in [(2, Encoding.COMPACT), (3, Encoding.CHANGE)]:
        encodings.clear()
        expected = _steps(team, network, reference, version)
        assert all(torch.equal(worker.take(), expected) for worker in team)
        assert set(encodings) == {encoding}


def _first_orders(team: list[StepWorker], network: MemoryNetwork, version: int) -> None:
    """Let all send their parts, and only rank 0 be ordered to step."""
    for rank, worker in enumerate(team):
        worker.start(_gradient(rank, version), version)
    team[0].order(version)
    network.pump()


@both
def test_a_slower_worker_may_look_at_weights_that_their_owner_has_stepped(kind: str) -> None:
    team, network = _team(kind, 2, is_rounded=True)
    reference = Reference(2)
    before = _steps(team, network, reference, 1)
    for worker in team:
        worker.take()
    _first_orders(team, network, 2)
    assert torch.equal(_join(_fetch(team[1], network, Ask.WEIGHTS, 1)), before)
    chunks = team[1].slot.chunks
    asked = [team[1].desk.fetch(chunk, Ask.STATE, 1) for chunk in chunks]
    network.pump()
    assert [future.result(0).is_past for future in asked] == [chunk.owner == 0 for chunk in chunks]
    team[1].order(2)
    network.pump()
    expected = reference.step(2)
    assert all(torch.equal(worker.take(), expected.bfloat16().float()) for worker in team)


def test_looks_between_a_backward_and_its_step_do_not_end_the_rounding_that_has_begun() -> None:
    team, network = _team("device", 2, is_rounded=True)
    reference = Reference(2)
    for version in (1, 2):
        _steps(team, network, reference, version)
        for worker in team:
            worker.take()
        if version == 1:
            _fetch(team[1], network, Ask.WEIGHTS, version)
    _first_orders(team, network, 3)
    chunk = next(chunk for chunk in team[1].slot.chunks if chunk.owner == 0)
    future = team[1].desk.fetch(chunk, Ask.WEIGHTS, 2)
    network.pump()
    assert not future.result(0).is_exact_later


def test_after_a_step_that_was_left_out_nobody_is_taken_to_have_exact_weights() -> None:
    team, network = _team("device", 2, is_rounded=True)
    reference = Reference(2)
    _steps(team, network, reference, 1)
    for rank, worker in enumerate(team):
        worker.take()
        for chunk in worker.slot.chunks:
            worker.shard.stop_rounding(chunk)
        worker.start(_gradient(rank, 2), 2)
    for worker in team:
        worker.order(2, update=None)
    network.pump()  # nobody takes what comes
    expected = _steps(team, network, reference, 3)
    assert all(torch.equal(worker.take(), expected) for worker in team)


def test_a_part_cannot_be_a_change() -> None:
    team, _ = _team("device", 2)
    chunk = team[0].slot.chunks[0]
    with pytest.raises(ServerError, match="as a change"):
        team[0].adder.decode(chunk, Encoding.CHANGE, memoryview(b""))


def test_what_is_past_or_not_owned_is_refused() -> None:
    team, network = _team("host", 2)
    _steps(team, network, Reference(2), 1)
    others = next(chunk for chunk in team[0].slot.chunks if chunk.owner == 1)
    team[0].desk.fetch(others, Ask.WEIGHTS, 0)
    with pytest.raises(ServerError, match="version 0 of chunk"):
        network.pump()


def test_a_lost_peer_ends_what_was_asked() -> None:
    team, network = _team("host", 2)
    chunk = next(chunk for chunk in team[0].slot.chunks if chunk.owner == 1)
    future = team[0].desk.fetch(chunk, Ask.WEIGHTS, 0)
    team[0].desk.fail(ZeroDivisionError("gone"))
    for one in (future, team[0].desk.fetch(chunk, Ask.MEAN, 0)):
        with pytest.raises(ZeroDivisionError):
            one.result(0)
    assert team[0].desk.leave().done()
    assert network.pump() >= 1


def test_who_leaves_answers_until_all_have_left() -> None:
    team, network = _team("host", 3)
    done = [team[rank].desk.leave() for rank in range(2)]
    network.pump()
    assert not any(future.done() for future in done)
    team[2].desk.leave()
    network.pump()
    assert all(future.done() for future in done)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_end_at_aligned_places_of_parameters(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([1, 7, 300, 5000, 70000]) for _ in range(draw.randint(1, 6))]
    (cut,) = make_slots(0, [sum(sizes)], [4], 4, 4096)
    slot = align(cut, sizes)
    starts = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    position = 0
    for index, chunk in enumerate(slot.chunks):
        assert (chunk.index, chunk.start) == (index, position)
        assert chunk.length > 0
        position = chunk.stop
        before = max(start for start in starts if start <= chunk.stop)
        assert (chunk.stop - before) % ALIGNMENT == 0
    assert position == sum(sizes)


def test_rows_of_a_table_come_exactly_from_all_chunks_in_which_they_lie() -> None:
    table = nn.Parameter(torch.randn(40, 30, generator=torch.Generator().manual_seed(2)))
    with torch.no_grad():
        table[3] = -0.0
    (slot,) = make_slots(0, [1200], [4], 3, 4 * 97)  # chunks end in the middle of rows
    item: Any = SimpleNamespace(parameters=[table])
    shards = [Shard([(item, slot)], rank, {table}) for rank in range(3)]
    wanted = np.array([0, 3, 4, 9, 38, 39])
    bits, earlier = np.zeros((6, 30), np.int32), np.zeros((6, 30), np.int32)
    for chunk in slot.chunks:
        where, numbers = rows_in_chunk(wanted, chunk, 30)
        shard = shards[chunk.owner]
        bits[where] |= np.frombuffer(shard.rows_of(chunk, numbers.data, None), np.int32).reshape(-1, 30)
        before = table.detach().view(-1)[chunk.start : chunk.stop] * 2
        earlier[where] |= np.frombuffer(shard.rows_of(chunk, numbers.data, before), np.int32).reshape(-1, 30)
        with pytest.raises(ServerError, match=r"rows \[9\d\] of chunk \d+ .* were asked for; it has [345]"):
            shard.rows_of(chunk, np.array([90 + chunk.index % 10]).data, None)
    expected = table.detach()[torch.from_numpy(wanted)]
    assert np.array_equal(bits, expected.view(torch.int32).numpy())
    assert np.array_equal(earlier, (expected * 2).view(torch.int32).numpy())


@both
def test_the_step_waits_for_touched_rows_and_uses_them(kind: str) -> None:
    team, network = _team(kind, 3, seed=4)
    for worker in team:
        worker.slot = replace(worker.slot, width=10)
        worker.book()
    touched = np.array([0, 7, 11])
    values = np.random.default_rng(1).standard_normal((3, 10)).astype(np.float32)
    for rank, worker in enumerate(team):
        worker.start(_gradient(rank, 0), 1)
        worker.order(1)
    network.pump()
    assert not any(worker.future.done() for worker in team)
    for worker in team:
        worker.server.send_touched(worker.slot, 1, TouchedRows(touched, values))
    network.pump()
    rows = torch.zeros(SIZE)
    for _ in team:
        rows[: 12 * 10].view(12, 10)[torch.from_numpy(touched)] += torch.from_numpy(values)
    mean = (_gradient(0, 0) + _gradient(1, 0) + _gradient(2, 0) + rows) / 3
    reference = Reference(3)
    parts = mean.split([parameter.numel() for parameter in reference.parameters])
    for parameter, part in zip(reference.parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    reference.optimizer.step()
    assert all(torch.equal(worker.take(), reference.flat) for worker in team)


class Held(StepThread):
    """Keeps what it is given until :meth:`taken` asks."""

    def __init__(self, most_values: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda _: None)
            super().__init__(most_values=most_values)

    def taken(self) -> list[int]:
        """Return the versions of the jobs that are stepped next, together."""
        return [job.version for job in self._take()]


def test_steps_that_wait_are_taken_together_by_urgency_up_to_a_number_of_values() -> None:
    thread = Held(most_values=100)
    first, second = object(), object()

    def put(priority: int, values: int, order: object) -> None:
        waiting: Any = SimpleNamespace(total=SimpleNamespace(chunk=Chunk(0, 0, 0, values, 0)))
        adder: Any = None
        # The version tells one job from another.
        thread.put(priority, StepJob(adder, [waiting], 1000 * priority + values, order))

    put(3, 20, first)
    put(1, 50, first)
    put(2, 30, first)
    put(4, 1, first)
    assert thread.taken() == [1050, 2030, 3020]  # the next one would be one value too many
    put(5, 200, first)
    put(6, 1, second)
    assert thread.taken() == [4001]
    assert thread.taken() == [5200]  # too large for company, but not to be stepped
    put(7, 1, first)
    assert thread.taken() == [6001]  # another order has other learning rates
    assert thread.taken() == [7001]
