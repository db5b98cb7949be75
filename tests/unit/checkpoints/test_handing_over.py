"""A state on its way to a worker that joins: tensors and the rest, pieces, changes, doors, and who sends what."""

from __future__ import annotations

import random
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import poseidon
from poseidon.checkpoints import ahead as ahead_module
from poseidon.checkpoints import lasting as lasting_module
from poseidon.checkpoints import layout
from poseidon.checkpoints.ahead import StateDoor, dealt, fetch_ahead
from poseidon.checkpoints.changes import BLOCK, apply_change, encode_change
from poseidon.checkpoints.lasting import LastingRun
from poseidon.checkpoints.layout import cut, describe_tensors, flatten, lift, lower, make_room, shape_rows, view_of
from poseidon.checkpoints.memory import StepMemory
from poseidon.checkpoints.program import ProgramState
from poseidon.checkpoints.sharing import Stock, plan_consignments
from poseidon.checkpoints.states import holds
from poseidon.errors import WorkerLostError
from poseidon.observe.steps import ENDING, FORWARD, StepClock
from poseidon.team import watch
from poseidon.wire.sealing import SEALED_BYTES

HERE = "127.0.0.1"


def same(one: Any, other: Any) -> bool:
    """Whether two states have the same structure, types and bits."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def a_state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "w": torch.randn(300, 70, generator=generator),
            "image": torch.randn(2, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last),
            "empty": torch.empty(0, 3),
            "count": torch.tensor(seed),
            "every second": torch.randn(12, generator=generator)[::2],
            "one of four": torch.randn(4, generator=generator)[::4],
            "expanded": torch.randn(1, generator=generator).expand(5),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(seed)), "m": torch.randn(300, 70, generator=generator)}}
        },
        "plain": [1, "two", (3.0, torch.ones(2, dtype=torch.bool))],
        "unusual": torch.eye(3).to_sparse(),
    }


def test_a_state_is_taken_apart_and_put_together() -> None:
    state = a_state(3)
    rest, tensors = lift(state)
    assert len(tensors) == 10
    assert rest["unusual"].is_sparse  # stays where it is
    assert rest["model"]["w"].numel() == 0
    description = describe_tensors(tensors)
    rows = make_room(description)
    for row, source in zip(rows, flatten(tensors), strict=True):
        row.copy_(source)
    again = lower(rest, shape_rows(rows, description))
    assert same({**again, "unusual": 0}, {**state, "unusual": 0})


def test_pieces_cover_every_byte_once_whoever_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "PIECE_BYTES", 1000)
    _, tensors = lift(a_state(1))
    pieces = cut(describe_tensors(tensors))
    for places in (1, 2, 3, 7):
        taken = [piece for place in range(places) for piece in dealt(pieces, place, places)]
        assert sorted(taken, key=lambda piece: piece.number) == pieces
    for number, tensor in enumerate(tensors):
        mine = [piece for piece in pieces if piece.tensor == number]
        assert [piece.start for piece in mine] == [*range(0, tensor.nbytes, 1000)]
        assert sum(piece.size for piece in mine) == tensor.nbytes


@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 8 * BLOCK, 40 * BLOCK + 13])
def test_a_change_gives_the_same_bytes(size: int) -> None:
    generator = np.random.default_rng(size)
    old = generator.integers(0, 256, size, dtype=np.uint8)
    for kind in ("none", "one", "first", "last", "many", "all"):
        new = old.copy()
        if kind in ("one", "first", "last"):
            new[{"one": size // 2, "first": 0, "last": -1}[kind]] ^= 129
        elif kind == "many":
            new[:: 3 * BLOCK] ^= 1
        elif kind == "all":
            new ^= 1
        change = encode_change(old.data, new.data)
        assert (change == b"") == (kind == "none")
        if change is None:
            assert kind == "all" or size <= 2 * BLOCK
            continue
        assert len(change) <= size // 2 + 2 * BLOCK
        room = old.copy()
        apply_change(room.data, change)
        assert bytes(room) == bytes(new)


def test_what_is_no_change_of_these_bytes_is_refused() -> None:
    old, new = np.zeros(10 * BLOCK + 5, np.uint8), np.zeros(10 * BLOCK + 5, np.uint8)
    new[3] = new[-1] = 1
    change = encode_change(old.data, new.data)
    assert change is not None
    for wrong in (change[:-1], change + b"0", b"x"):
        with pytest.raises(ValueError, match="does not fit"):
            apply_change(old.data, wrong)


def test_what_is_lent_stays_as_it_is_and_memory_is_used_again_afterwards() -> None:
    memory = StepMemory()
    weights = torch.zeros(10)

    def keep(step: int) -> None:
        memory.keep(step, {"w": weights.fill_(step)}, {}, {})

    assert memory.lend() is None
    keep(1)
    first = memory.kept
    keep(2)
    assert memory.kept is not None
    assert first is not None
    assert memory.kept.parts["w"] is first.parts["w"]
    lent = memory.lend()
    keep(3)
    assert memory.lend() is lent  # the same to all who ask
    assert lent is not None
    assert (lent.step, lent.parts["w"][0]) == (2, 2)
    third = memory.kept.parts["w"]
    keep(4)
    assert memory.kept.parts["w"] is third
    memory.take_back()
    keep(5)
    assert memory.kept.parts["w"] is third
    assert lent.parts["w"][0] == 2


def test_a_copy_that_fails_is_not_gone_on_from() -> None:
    class Broken(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("no memory")

    memory = StepMemory()
    memory.keep(1, {"w": torch.ones(1)}, {}, {})
    with pytest.raises(RuntimeError, match="no memory"):
        memory.keep(2, {"w": torch.ones(1), "x": Broken()}, {}, {})
    assert memory.kept is None


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_SECRET", "0123456789abcdef0123456789abcdef")


@pytest.mark.parametrize(("encrypts", "piece_bytes"), [(False, 10_000), (True, 10_000), (True, 40_000)])
def test_a_joiner_copies_a_part_from_each_of_several_workers(
    secret: None, monkeypatch: pytest.MonkeyPatch, encrypts: bool, piece_bytes: int
) -> None:
    monkeypatch.setattr(layout, "PIECE_BYTES", piece_bytes)
    memories = [StepMemory() for _ in range(3)]
    for step, memory in enumerate(memories):  # a worker may be ahead by a step
        memory.keep(step, a_state(step), {}, {})
    doors = [StateDoor(memory, HERE, encrypts) for memory in memories]
    try:
        ahead = fetch_ahead([(HERE, door.port) for door in doors], HERE, encrypts)
        assert ahead is not None
        assert ahead.complete == {0, 1, 2}
        pieces = cut(ahead.description)
        assert len(pieces) > 3
        assert piece_bytes < SEALED_BYTES or any(piece.size >= SEALED_BYTES for piece in pieces)
        for place, door in enumerate(doors):
            lent = door.lent[ahead.token]
            for piece in dealt(pieces, place, 3):
                assert view_of(ahead.rows, piece) == view_of(flatten(lift(a_state(place))[1]), piece)
                assert view_of(lent.rows, piece) == view_of(ahead.rows, piece)
        for door in doors:
            door.settle()
            assert not door.lent
    finally:
        for door in doors:
            door.close()


def test_what_one_worker_cannot_give_is_left_out(secret: None) -> None:
    memory = StepMemory()
    memory.keep(1, a_state(1), {}, {})
    door, empty = StateDoor(memory, HERE, False), StateDoor(StepMemory(), HERE, False)
    with socket.create_server((HERE, 0)) as listener:
        gone = listener.getsockname()[1]
    try:
        ahead = fetch_ahead([(HERE, empty.port), (HERE, door.port), (HERE, gone)], HERE, False)
        assert ahead is not None
        assert ahead.complete == {1}
        assert fetch_ahead([(HERE, empty.port)], HERE, False) is None
        assert not empty.lent
    finally:
        door.close()
        empty.close()


def test_room_for_the_next_step_is_made_while_something_is_lent() -> None:
    memory = StepMemory()
    memory.make_room()
    memory.keep(1, {"w": torch.full((10,), 1.0)}, {"o": torch.ones(2)}, {})
    memory.make_room()  # nothing is lent
    assert memory._spare is None
    lent = memory.lend()
    assert lent is not None
    memory.make_room()
    assert memory._spare is not None
    room = memory._spare.parts["w"]
    memory.keep(2, {"w": torch.full((10,), 2.0)}, {"o": torch.ones(2)}, {})
    assert memory.kept is not None
    assert memory.kept.parts["w"] is room
    assert (float(lent.parts["w"][0]), float(room[0])) == (1.0, 2.0)
    memory.make_room()  # there is some
    assert memory._spare is None


def test_what_is_being_sent_stays_lent_when_others_have_joined(secret: None) -> None:
    memory = StepMemory()
    memory.keep(1, a_state(1), {}, {})
    kept = memory.kept
    door = StateDoor(memory, HERE, False)
    try:
        with ahead_module.enter(ahead_module.credentials(False), 1, 0, (HERE, door.port), HERE, 5.0) as connection:
            ahead_module._send(connection, {"token": "slow", "place": 0, "places": 1})
            assert ahead_module._receive(connection)["description"]
            assert fetch_ahead([(HERE, door.port)], HERE, False) is not None
            door.settle()
            assert list(door.lent) == ["slow"]
            assert memory.lend() is kept
        while door.lent:  # until its thread sees that the joiner is gone
            time.sleep(0.01)
        memory.keep(2, a_state(2), {}, {})
        assert memory.lend() is not kept
    finally:
        door.close()


def test_a_stranger_gets_nothing(secret: None, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = StepMemory()
    memory.keep(1, a_state(1), {}, {})
    door = StateDoor(memory, HERE, False)
    try:
        monkeypatch.setattr(ahead_module, "ENTER_S", 0.5)
        monkeypatch.setenv("POSEIDON_SECRET", "f" * 32)
        assert fetch_ahead([(HERE, door.port)], HERE, False) is None
        assert not door.lent
    finally:
        door.close()


def test_who_sends_what() -> None:
    # Nobody has copied anything: both holders send a half to each.
    plan = plan_consignments([Stock(5), Stock(5), Stock(4), Stock(-1)])
    assert {(each.receiver, each.place, each.places, each.is_change) for each in plan} == {
        (2, 0, 2, False), (2, 1, 2, False), (3, 0, 2, False), (3, 1, 2, False),
    }  # fmt: skip
    assert {each.sender for each in plan if each.receiver == 2} == {0, 1}
    # A joiner has copied from three, of which one is gone and one was a step behind.
    plan = plan_consignments([Stock(7, lent={"t": 1}), Stock(6, lent={"t": 2}), Stock(-1, "t", 3, (0, 1, 2)), Stock(7)])
    joiner = {each.place: each for each in plan if each.receiver == 2}
    assert joiner.keys() == {0, 1, 2}
    assert (joiner[1].sender, joiner[1].is_change) == (0, True)
    assert not joiner[0].is_change
    assert not joiner[2].is_change
    assert {each.receiver for each in plan} == {1, 2}


@pytest.mark.parametrize("seed", range(50))
def test_everybody_who_lacks_it_gets_every_part_from_one_who_has_it(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 6)
    tokens = [f"t{rank}" for rank in range(count)]
    stocks = []
    for rank in range(count):
        has_ahead = chance.random() < 0.5
        places = chance.randint(1, 4) if has_ahead else 0
        complete = tuple(place for place in range(places) if chance.random() < 0.7)
        lent = {token: chance.randrange(4) for token in tokens if chance.random() < 0.4}
        step = chance.choice([-1, 3, 4])
        stocks.append(Stock(step, tokens[rank] if has_ahead else "", places, complete, lent))
    is_alike = chance.random() < 0.7
    plan = plan_consignments([Stock.read(each.facts()) for each in stocks], is_alike)
    newest = max(each.step for each in stocks)
    # Where workers differ, all comes from the one whose description of it all get.
    assert is_alike or {one.sender for one in plan} <= {[each.step for each in stocks].index(newest)}
    for rank, each in enumerate(stocks):
        mine = [one for one in plan if one.receiver == rank]
        assert bool(mine) == (each.step < newest)
        if mine:
            assert sorted(one.place for one in mine) == [*range(mine[0].places)]
        for one in mine:
            assert stocks[one.sender].step == newest
            if one.is_change:
                assert stocks[one.sender].lent[each.token] == one.place
                assert one.place in each.complete
                assert one.places == each.places


def test_a_worker_that_waits_for_others_saves_what_it_keeps_when_it_is_asked_to_end(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with poseidon.Checkpoint(tmp_path, model=model) as checkpoint:
        checkpoint.values["best"] = 0.5
        job: Any = SimpleNamespace(seat=None)
        lasting = LastingRun(job, checkpoint._program, checkpoint._saving, checkpoint._ending, replicas=1)
        lasting.keep(7)
        lasting.end_if_asked()  # nobody has asked
        signal.raise_signal(signal.SIGINT)
        with torch.no_grad():
            kept = model.weight.clone()
            model.weight.zero_()  # the step that was interrupted
        with pytest.raises(SystemExit) as ended:
            lasting.end_if_asked()
        assert ended.value.code == 128 + signal.SIGINT
    with poseidon.Checkpoint(tmp_path, model=model) as checkpoint:
        assert checkpoint.resume() == 7
        assert checkpoint.values == {"best": 0.5}
    assert torch.equal(model.weight, kept)


def test_the_steps_of_a_worker_whom_the_others_have_left_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(0.0)
    clock.mark(ENDING, 55, 1.0)  # in which the others were lost
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(watch, "_RECORDERS", [SimpleNamespace(clock=clock)])
    monkeypatch.setattr(watch.report, "tell", lambda **facts: told.append(facts))
    with poseidon.Checkpoint(None, model=torch.nn.Linear(3, 2)) as checkpoint:
        job: Any = SimpleNamespace(seat=None, is_wanted=False)
        lasting = LastingRun(job, checkpoint._program, checkpoint._saving, checkpoint._ending, replicas=1)
        checkpoint._lasting, lasting.is_running = lasting, True
        for done in (56, 57):
            checkpoint.step(done)
    assert (clock.step, clock.steps, clock.phase) == (57, 2, FORWARD)
    assert told[-1] == {"step": 57, "doing": "in forward"}


def test_an_interrupted_evaluation_leaves_no_module_in_its_mode(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout())
    model[1].eval()  # on purpose, and for good
    with poseidon.Checkpoint(tmp_path, model=model) as checkpoint:
        job: Any = SimpleNamespace(seat=None)
        lasting = LastingRun(job, checkpoint._program, checkpoint._saving, checkpoint._ending, replicas=1)
        lasting.keep(7)
        model.eval()
        assert lasting._memory.kept is not None
        lasting._take_over(lasting._memory.kept, is_new=False)
    assert [module.training for module in model.modules()] == [True, True, False]


def test_the_same_workers_do_not_meet_for_ever_without_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's own deadlock looks like lost workers to those who wait too long."""
    calls = []

    def train(done: int) -> None:
        calls.append(done)
        raise WorkerLostError("nobody is dead, but rank 1 waits for something else")

    with poseidon.Checkpoint(tmp_path, model=torch.nn.Linear(3, 2)) as checkpoint:
        job: Any = SimpleNamespace(seat=SimpleNamespace(epoch=1), is_over=False, door=0)
        lasting = LastingRun(job, checkpoint._program, checkpoint._saving, checkpoint._ending, replicas=1)
        monkeypatch.setattr(lasting_module, "open_door", lambda *_: None)
        monkeypatch.setattr(lasting_module, "enter_next_epoch", lambda *_: None)
        with (
            pytest.warns(UserWarning, match="the same 1 workers met again: nobody is dead"),
            pytest.raises(WorkerLostError, match="nobody is dead"),
        ):
            lasting.run(train)
    assert calls == [0, 0, 0, 0]


def test_an_optimizer_that_no_part_holds_is_told(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    member = SimpleNamespace(stepped_optimizer=optimizer)
    assert not ProgramState({"model": net, "optimizer": optimizer}, {}).find_missing([member, object()])
    (said,) = ProgramState({"model": net}, {}).find_missing([member])
    assert "the SGD of a distributed model is not among its parts (model)" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_what_workers_have_made_apart_does_not_pass_for_a_common_step_when_they_are_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The next epoch would find that all have step 0, and train different models."""

    def interrupt(*_: object, **__: object) -> None:
        raise WorkerLostError("a worker is lost")

    monkeypatch.setattr(lasting_module, "hand_over", interrupt)
    with poseidon.Checkpoint(tmp_path, model=torch.nn.Linear(3, 2)) as checkpoint:
        job: Any = SimpleNamespace(seat=None)
        lasting = LastingRun(job, checkpoint._program, checkpoint._saving, checkpoint._ending, replicas=1)
        team: Any = SimpleNamespace(rank=rank, size=2, gather_json=lambda mine: [mine, mine], close=lambda: None)
        monkeypatch.setattr(checkpoint._saving, "team", team)
        with pytest.raises(WorkerLostError):
            lasting._share()
        kept = lasting._memory.kept
    # Only the one whose objects all get.
    assert (kept is not None) == (rank == 0)


def test_which_parts_hold_a_distributed_model() -> None:
    inner = torch.nn.Linear(2, 2)
    wrapped = poseidon.DistributedDataParallel(inner)
    around = torch.nn.Sequential(wrapped)
    assert all(holds(part, wrapped) for part in (inner, wrapped, around, torch.nn.Sequential(inner)))
    assert not holds(torch.nn.Linear(2, 2), wrapped)
    assert not holds(torch.optim.SGD(inner.parameters(), 0.1), wrapped)
