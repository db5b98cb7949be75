from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import poseidon.following.streams as streams_of
from poseidon.following.patches import Patches
from poseidon.following.streams import ALIKE, APART, Streams, WorkerSeeds, derive

Draws = tuple[float, float, float]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


def draw() -> Draws:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def life(rank: int) -> dict[str, Draws]:
    """Draw at each stage of a script's life as worker ``rank`` does."""
    patches = Patches()
    streams = Streams(rank, 5)
    streams.install(patches)
    try:
        found = {"before": draw()}
        streams.part()
        found["script"] = draw()
        with streams.using(ALIKE):
            found["sampler"] = draw()
        with streams.using(APART):
            found["fetch"] = draw()
        torch.manual_seed(9)
        found["seeded"] = draw()
        with streams.using(ALIKE):
            found["sampler, seeded"] = draw()
        found["generator"] = (float(np.random.default_rng().random()),) * 3
        return found
    finally:
        patches.undo()


def test_workers_draw_alike_where_they_must_and_apart_where_they_should() -> None:
    first, second = life(0), life(1)
    assert first["before"] == second["before"]
    assert first["sampler"] == second["sampler"]
    assert first["sampler, seeded"] == second["sampler, seeded"]
    assert first["generator"] == second["generator"]
    for stage in ("script", "seeded"):
        assert first[stage][0] != second[stage][0], "torch's noise is each worker's own"
        assert first[stage][1:] == second[stage][1:], "a script decides alike with random and numpy"
    assert all(one != other for one, other in zip(first["fetch"], second["fetch"], strict=True))


class Device:
    """Stands for the generator of a CUDA device, which may be used later than others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_used: bool = True) -> None:
        self.is_used = is_used
        self.generator = torch.Generator().manual_seed(5)
        monkeypatch.setitem(streams_of._LIBRARIES, "cuda", (self.read, self.write, self.state_of))

    def read(self) -> list[Any]:
        return [self.generator.get_state()] if self.is_used else []

    def write(self, states: list[Any]) -> None:
        for state in states:
            if isinstance(state, int):
                self.generator.manual_seed(state)
            else:
                self.generator.set_state(state)

    def state_of(self, seed: int) -> list[Any]:
        return [torch.Generator().manual_seed(seed).get_state() if self.is_used else seed]

    def draw(self) -> float:
        return torch.rand((), generator=self.generator).item()


def life_on_a_device(rank: int, monkeypatch: pytest.MonkeyPatch, is_used: bool) -> dict[str, float]:
    device, patches, streams = Device(monkeypatch, is_used), Patches(), Streams(rank, 5)
    streams.install(patches)
    try:
        streams.part()
        device.is_used = True
        if not is_used:
            streams.rejoin()
            streams.part()
        found = {"training": device.draw()}
        with streams.using(ALIKE):
            found["sampler"] = device.draw()
        found["training again"] = device.draw()
        streams.rejoin()
        found["between passes"] = device.draw()
        torch.manual_seed(9)
        found["seeded"] = device.draw()
        streams.part()
        found["seeded, training"] = device.draw()
        return found
    finally:
        patches.undo()


@pytest.mark.parametrize("is_used", [True, False])
def test_devices_follow_torchs_own_generator(is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (life_on_a_device(rank, monkeypatch, is_used) for rank in (0, 1))
    alike = {name for name in first if first[name] == second[name]}
    assert alike == {"sampler", "between passes", "seeded"}
    plain = torch.Generator().manual_seed(5)
    draws = [torch.rand((), generator=plain).item() for _ in range(2)]
    assert [first["training"], first["training again"]] == draws


def test_worker_0_draws_what_a_plain_run_draws() -> None:
    found = life(0)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert found["before"] == draw()
    assert found["script"] == draw()
    torch.manual_seed(9)
    assert found["seeded"][0] == torch.rand(()).item()


def test_a_saved_state_brings_back_the_order_too() -> None:
    patches = Patches()
    streams = Streams(1, 5)
    streams.install(patches)
    try:
        streams.part()
        with torch.random.fork_rng():  # as around an evaluation before training
            with streams.using(ALIKE):
                first = torch.rand(3)
            torch.rand(5)
        with streams.using(ALIKE):
            assert torch.equal(torch.rand(3), first)
    finally:
        patches.undo()


def test_a_pass_that_was_no_training_leaves_the_workers_together() -> None:
    drawn = []
    for rank in range(2):
        patches = Patches()
        streams = Streams(rank, 5)
        streams.install(patches)
        try:
            streams.part()
            with streams.using(APART):
                draw()
            streams.rejoin()
            drawn.append(draw())
            streams.part()
            drawn.append((torch.rand(()).item(), 0.0, 0.0))
        finally:
            patches.undo()
    assert drawn[0] == drawn[2]
    assert drawn[1] != drawn[3]


def test_what_is_drawn_aside_leaves_no_trace() -> None:
    streams = Streams(1, 3)
    expected = (torch.get_rng_state(), random.getstate())
    with streams.untouched():
        draw()
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]


def test_loader_processes_are_seeded_per_worker_and_then_as_the_script_wants() -> None:
    called: list[int] = []
    states = []
    for rank in range(2):
        torch.manual_seed(4)
        WorkerSeeds(rank, called.append)(7)
        states.append(torch.rand(()).item())
    assert states[0] != states[1]
    assert called == [7, 7]


def test_seeds_of_different_workers_differ() -> None:
    assert derive(3, 0) == 3
    assert len({derive(seed, rank) for seed in range(20) for rank in range(20)}) > 380


def test_workers_that_drew_unequally_often_go_on_alike() -> None:
    found = {}
    for rank in (0, 1):
        patches, streams = Patches(), Streams(rank, 5)
        streams.install(patches)
        try:
            streams.part()
            for _ in range(3 + rank):
                random.gauss(0.0, 1.0)  # keeps a second value for later
                np.random.normal()
            with streams.using(ALIKE):
                torch.rand(1 + rank)
            if rank == 0:
                there = streams.alike_as_bytes()
                mark = streams.mark()
            else:
                assert streams.mark() != mark
                with streams.using(APART):  # as while samples are fetched
                    streams.go_on_from(there)
                assert streams.mark() == mark
            with streams.using(ALIKE):
                found[rank] = (draw(), random.gauss(0.0, 1.0), np.random.normal())
        finally:
            patches.undo()
    assert found[0] == found[1]
