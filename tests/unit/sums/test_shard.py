from __future__ import annotations

import functools
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError, ServerError
from poseidon.sums import shard as shard_module
from poseidon.sums.chunks import Chunk
from poseidon.sums.shard import PIECE_BYTES, Shard

Array = np.ndarray[Any, Any]


def chunk_of(length: int, unit: int = 0, index: int = 0) -> Chunk:
    return Chunk(unit, index, 0, length, 0)


def gradients(workers: int, length: int, dtype: Any = np.float32) -> list[Array]:
    generator = np.random.default_rng(workers * 1000 + length)
    # Magnitudes differ by so much that another order of additions gives other bits.
    scales = 10.0 ** generator.integers(-3, 4, size=(workers, 1))
    return list((generator.standard_normal((workers, length)) * scales).astype(dtype))


def in_rank_order(values: list[Array]) -> Array:
    return functools.reduce(np.add, values)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_sum_has_the_same_bits_in_whatever_order_contributions_come(order: tuple[int, ...]) -> None:
    values = gradients(4, 1000)
    assert not np.array_equal(in_rank_order(values), in_rank_order(values[::-1]))
    shard = Shard([chunk_of(1000)], range(4))
    results = [shard.add(0, 0, 0, rank, values[rank]) for rank in order]
    assert [r is None for r in results] == [True, True, True, False]
    assert results[-1] is not None
    assert np.array_equal(results[-1], in_rank_order(values))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_chunks_are_summed_alike_and_contributions_left_alone(workers: int, dtype: str) -> None:
    length = 3 * PIECE_BYTES // 4 + 5
    values = gradients(workers, length, dtype)
    copies = [one.copy() for one in values]
    shard = Shard([chunk_of(length)], range(workers), formats=dtype)
    for clock, order in enumerate([range(workers), reversed(range(workers))]):
        results = [shard.add(0, 0, clock, rank, values[rank]) for rank in order]
        assert results[-1] is not None
        assert np.array_equal(results[-1], in_rank_order(values))
        assert results[-1].dtype == dtype
    assert all(map(np.array_equal, values, copies))
    assert not any(np.shares_memory(results[-1], one) for one in values)


def test_the_mean_divides_the_sum_once() -> None:
    values = gradients(3, 50)
    shard = Shard([chunk_of(50)], range(3), mean=True)
    [*_, result] = [shard.add(0, 0, 0, rank, one) for rank, one in enumerate(values)]
    assert result is not None
    assert np.array_equal(result, in_rank_order(values) / np.float32(3))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_added_in_float32_and_rounded_once(workers: int, name: str) -> None:
    dtype = getattr(torch, name)
    tensors = [torch.from_numpy(one).to(dtype) for one in gradients(workers, 300)]
    expected = functools.reduce(torch.add, [one.float() for one in tensors]).to(dtype)
    stored = [t.numpy() if name == "float16" else t.view(torch.uint16).numpy() for t in tensors]
    shard = Shard([chunk_of(300)], range(workers), formats={0: name})
    for clock in range(2):
        results = [shard.add(0, 0, clock, rank, stored[rank]) for rank in reversed(range(workers))]
        assert results[-1] is not None
        result = torch.from_numpy(results[-1]).view(dtype)
        assert torch.equal(result, expected)


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_bfloat16_rounds_as_torch_does(numbers: list[float]) -> None:
    from poseidon.wire.formats import FORMATS

    values = np.array(numbers, np.float32)
    ours = torch.from_numpy(FORMATS["bfloat16"].narrow(values)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_infinite_gradients_pass_without_noise() -> None:
    shard = Shard([chunk_of(2)], range(3))
    infinite = np.array([np.inf, 3e38], np.float32)
    shard.add(0, 0, 0, 0, infinite)
    shard.add(0, 0, 0, 1, -infinite)
    result = shard.add(0, 0, 0, 2, infinite)
    assert result is not None
    assert np.isnan(result[0])


def test_released_memory_serves_later_sums() -> None:
    shard = Shard([chunk_of(8)], range(2))
    values = gradients(2, 8)
    shard.add(0, 0, 0, 0, values[0])
    first = shard.add(0, 0, 0, 1, values[1])
    assert first is not None
    shard.release(first)
    shard.add(0, 0, 1, 0, values[0])
    assert shard.add(0, 0, 1, 1, values[1]) is first


def test_chunks_are_summed_apart_and_say_whom_they_await() -> None:
    shard = Shard([chunk_of(4), chunk_of(3, unit=2, index=1), chunk_of(5, unit=7)], [4, 2, 9])
    ones = np.ones(5, np.float32)
    shard.add(0, 0, 0, 4, ones[:4])
    shard.add(2, 1, 5, 2, ones[:3])
    assert shard.awaited() == {(0, 0): [2, 9], (2, 1): [4, 9]}


def test_many_threads_finish_every_sum_once_with_the_same_bits() -> None:
    workers, chunks, clocks = 4, 8, 20
    values = gradients(workers, 5000)
    shard = Shard([chunk_of(5000, index=i) for i in range(chunks)], range(workers))
    finished: list[tuple[int, int, bytes]] = []
    gates = [threading.Barrier(workers) for _ in range(clocks)]

    def send(rank: int) -> None:
        for clock in range(clocks):
            gates[clock].wait(30)
            for index in range(chunks):
                result = shard.add(0, (index + rank) % chunks, clock, rank, values[rank])
                if result is not None:
                    finished.append((clock, (index + rank) % chunks, result.tobytes()))

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(f[:2] for f in finished) == [(clock, index) for clock in range(clocks) for index in range(chunks)]
    assert {f[2] for f in finished} == {in_rank_order(values).tobytes()}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ((0, 1, 3, 1, 4), "rank 1 sent chunk 1 of unit 0, which this shard does not own"),
        ((0, 0, 3, 5, 4), r"rank 5 sent chunk 0 of unit 0, but the workers are \[0, 1, 2\]"),
        ((0, 0, 3, 1, 9), "rank 1 sent 9 values of float32 .* expected 4"),
        ((0, 0, 3, 0, 4), "rank 0 sent chunk 0 of unit 0 of clock 3 twice"),
        ((0, 0, 3, 2, 4), "rank 2 sent chunk 0 of unit 0 of clock 3 twice"),
        ((0, 0, 4, 1, 4), "rank 1 sent chunk 0 of unit 0 of clock 4 while clock 3 is being summed"),
    ],
)
def test_what_does_not_belong_is_refused_and_harms_nothing(call: tuple[int, int, int, int, int], words: str) -> None:
    shard = Shard([chunk_of(4)], range(3))
    values = gradients(3, 4)
    shard.add(0, 0, 3, 0, values[0])
    shard.add(0, 0, 3, 2, values[2])
    unit, chunk, clock, rank, length = call
    with pytest.raises(ServerError, match=words):
        shard.add(unit, chunk, clock, rank, np.zeros(length, np.float32))
    result = shard.add(0, 0, 3, 1, values[1])
    assert result is not None
    assert np.array_equal(result, in_rank_order(values))
    with pytest.raises(ServerError, match="clock 3 is finished already"):
        shard.add(0, 0, 3, 1, values[1])


def test_a_wrong_dtype_or_format_is_refused() -> None:
    shard = Shard([chunk_of(4)], [0])
    with pytest.raises(ServerError, match=r"4 values of float64 .* expected 4 of float32"):
        shard.add(0, 0, 0, 0, np.zeros(4))
    with pytest.raises(ConfigError, match="unknown number format 'int8'; known: bfloat16, float16, float32, float64"):
        Shard([chunk_of(4)], [0], formats="int8")
    with pytest.raises(ConfigError, match="workers are"):
        Shard([chunk_of(4)], [1, 1])


@pytest.mark.parametrize(("workers", "passes"), [(2, [2]), (4, [4]), (5, [4, 2]), (8, [4, 5]), (9, [4, 5, 2])])
def test_contributions_are_added_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, workers: int, passes: list[int]
) -> None:
    added: list[int] = []
    whole = shard_module._sum_pieces

    def count(values: list[Array], target: Array) -> None:
        added.append(len(values))
        whole(values, target)

    monkeypatch.setattr(shard_module, "_sum_pieces", count)
    shard = Shard([chunk_of(100)], range(workers))
    values = gradients(workers, 100)
    results = [shard.add(0, 0, 0, rank, values[rank]) for rank in range(workers)]
    assert added == passes  # all but the first pass begin with the sum so far
    assert results[-1] is not None
    assert np.array_equal(results[-1], in_rank_order(values))
