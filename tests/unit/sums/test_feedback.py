"""Lossy sums over the in-memory network: nothing is lost for good, and everybody has the same bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from poseidon.errors import FrameError, ServerError
from poseidon.sums.feedback import LossyAdder
from poseidon.sums.lossy import Bf16Codec, Int4Codec, Int8Codec, LossyCodec, TopKCodec
from poseidon.sums.server import SumServer
from poseidon.sums.slots import make_slots
from poseidon.wire.formats import find_format
from poseidon.wire.memory import InFlightMessage, MemoryNetwork, make_memory_network
from poseidon.wire.pool import Pool

Array = np.ndarray[Any, Any]

CODECS: list[LossyCodec] = [Bf16Codec(), Int8Codec(64), Int4Codec(32), TopKCodec(0.05)]
SIZE = 3000


class LossyTeam:
    """Workers that sum one bucket step after step."""

    def __init__(self, workers: int, codec: LossyCodec, name: str = "float32", first_owner: int = 0) -> None:
        generator = random.Random(workers)

        def any_order(messages: Sequence[InFlightMessage]) -> int:
            return generator.randrange(len(messages))

        transports = make_memory_network(workers, any_order)
        self.network: MemoryNetwork = transports[0].network
        self.servers = [SumServer(transport) for transport in transports]
        self.kept = [np.zeros(SIZE, np.float32) for _ in range(workers)]
        self._codec, self._format = codec, find_format(name)
        self.move(first_owner)

    def move(self, first_owner: int) -> None:
        """Let others own the chunks, with what everybody has kept."""
        workers = len(self.servers)
        (self.slot,) = make_slots(first_owner, [SIZE], [4], workers, 4 * 700)
        for rank, server in enumerate(self.servers):
            adder = LossyAdder(self.slot, rank, self._codec, self.kept[rank], self._format, Pool(), workers)
            server.book([(self.slot, adder)])

    def step(self, parts: Sequence[Array], number: int) -> list[Array]:
        """Return what every worker has in place of its part."""
        values = [part.copy() for part in parts]
        futures = [s.start(v, self.slot, number) for s, v in zip(self.servers, values, strict=True)]
        self.deliver()
        for future in futures:
            _result(future)
        return values

    def deliver(self) -> None:
        """Let all messages arrive."""
        while self.network.step():
            pass


def _result(future: Future[Any]) -> None:
    assert future.done()
    future.result()


def draw(workers: int, step: int, zeros: float = 0.0) -> list[Array]:
    generator = np.random.default_rng([workers, step])
    parts = generator.standard_normal((workers, SIZE)) * 10.0 ** generator.integers(-4, 1, SIZE)
    parts[generator.random((workers, SIZE)) < zeros] = 0
    return list(parts.astype(np.float32))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_all_that_was_sent_and_all_that_is_kept_is_all_there_was(workers: int, codec: LossyCodec) -> None:
    team = LossyTeam(workers, codec)
    brought, received = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(12):
        if step == 6:
            team.move(1)  # what a worker has kept of its parts is now of the sum, and the other way round
        parts = draw(workers, step)
        means = team.step(parts, step)
        assert len({mean.tobytes() for mean in means}) == 1
        brought += np.sum(np.asarray(parts, np.float64), 0)
        received += workers * means[0].astype(np.float64)
    missing = np.sum(np.asarray(team.kept, np.float64), 0)
    # Each of 12 steps rounds in float32: parts, sums, and the division.
    np.testing.assert_allclose(received + missing, brought, rtol=0, atol=12 * workers * 4 * 2.0**-24 * 5)
    assert np.abs(missing).max() > 0


def test_small_whole_numbers_add_up_to_the_last_bit() -> None:
    # Two workers, so means are halves; bf16 leaves whole numbers out of numbers below 2^16.
    team = LossyTeam(2, Bf16Codec())
    generator = np.random.default_rng(1)
    brought, received = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(40):
        parts = generator.integers(-(2**14), 2**14, (2, SIZE)).astype(np.float32)
        means = team.step(list(parts), step)
        brought += parts.sum(0, dtype=np.float64)
        received += 2.0 * means[0]
    assert np.array_equal(received + np.sum(np.asarray(team.kept, np.float64), 0), brought)
    assert any(np.any(kept) for kept in team.kept)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_kept_is_sent_once_gradients_are_gone(codec: LossyCodec) -> None:
    team = LossyTeam(3, codec)
    team.step(draw(3, 0), 0)
    nothing = [np.zeros(SIZE, np.float32)] * 3
    sizes = []
    for step in range(1, 80):
        team.step(nothing, step)
        sizes.append(sum(float(np.abs(kept).sum()) for kept in team.kept))
    assert sizes[-1] < 1e-3 * sizes[0]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_infinity_reaches_all_workers_and_the_next_step_is_sound(codec: LossyCodec) -> None:
    team = LossyTeam(3, codec)
    team.step(draw(3, 0), 0)
    parts = draw(3, 1)
    parts[1][17], parts[2][2900] = np.inf, np.nan
    means = team.step(parts, 1)
    assert len({mean.tobytes() for mean in means}) == 1
    assert not np.isfinite(means[0][[17, 2900]]).any()
    assert all(np.isfinite(kept).all() for kept in team.kept)
    assert all(np.isfinite(mean).all() for mean in team.step(draw(3, 2), 2))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once_more_at_the_end(name: str) -> None:
    team, stored = LossyTeam(2, Int8Codec(64), name), find_format(name)
    parts = [stored.narrow(part) for part in draw(2, 0)]
    means = team.step(parts, 0)
    assert means[0].dtype == stored.stored
    assert np.array_equal(means[0], means[1])
    wanted = sum(stored.widen(part) for part in parts) / 2
    # Values in 4 bits are off by a fourteenth of the largest in their block at most, here and once more in the sum.
    assert np.abs(stored.widen(means[0]) - wanted).max() < 0.15 * np.abs(wanted).max()


def test_values_of_another_size_are_refused() -> None:
    team = LossyTeam(2, Bf16Codec())
    with pytest.raises(ServerError, match=r"given 7 values of float32; it holds 3000"):
        team.servers[0].start(np.zeros(7, np.float32), team.slot, 0)


def test_rows_of_a_table_are_refused() -> None:
    slot = LossyTeam(2, Bf16Codec()).slot
    adder = LossyAdder(slot, 0, Bf16Codec(), np.zeros(SIZE, np.float32), find_format("float32"), Pool(), 2)
    with pytest.raises(ServerError, match="slot 0 is summed lossily, but rows came for its values from 0"):
        adder.touch(slot.chunks[0], [])


def test_a_payload_of_another_encoding_is_refused() -> None:
    ours = LossyTeam(2, Bf16Codec())
    slot = ours.slot
    theirs = LossyAdder(slot, 1, Int8Codec(64), np.zeros(SIZE, np.float32), find_format("float32"), Pool(), 2)
    ours.servers[1].book([(slot, theirs)])
    values = draw(2, 0)
    ours.servers[1].start(values[1], slot, 0)
    future = ours.servers[0].start(values[0], slot, 0)
    with pytest.raises(FrameError, match="sent chunk 0 of slot 0 in encoding 6; the slot allows BF16"):
        ours.deliver()
    with pytest.raises(ServerError, match="in encoding 6"):
        future.result(timeout=0)
