from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.sums.chunks import Chunk
from poseidon.sums.host import PIECE_BYTES, HostAdder, host_adders
from poseidon.sums.slots import Slot
from poseidon.wire.formats import FORMATS
from poseidon.wire.pool import Pool
from sum_team import make_team

Array = np.ndarray[Any, Any]


def gradients(workers: int, length: int, dtype: Any = np.float32) -> list[Array]:
    generator = np.random.default_rng(workers * 1000 + length)
    # Magnitudes differ so much that another order of additions gives other bits.
    scales = 10.0 ** generator.integers(-3, 4, size=(workers, 1))
    return list((generator.standard_normal((workers, length)) * scales).astype(dtype))


def adder_of(length: int, name: str = "float32", pool: Pool | None = None, divisor: int = 1) -> tuple[HostAdder, Chunk]:
    chunk = Chunk(0, 0, 0, length, 0)
    return HostAdder(Slot(0, (chunk,), 0), 0, FORMATS[name], pool or Pool(), divisor), chunk


def add(adder: HostAdder, chunk: Chunk, values: list[Array], at_once: int = 4) -> Array:
    total = None
    for first in range(0, len(values), at_once):
        total = adder.add(chunk, values[first : first + at_once], total)
    assert total is not None
    payload = adder.encode(chunk, total).payload
    assert isinstance(payload, np.ndarray)
    return payload


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_chunks_are_added_from_left_to_right_and_parts_left_alone(workers: int, dtype: str, at_once: int) -> None:
    length = 3 * PIECE_BYTES // 4 + 5
    values = gradients(workers, length, dtype)
    copies = [one.copy() for one in values]
    adder, chunk = adder_of(length, dtype)
    total = add(adder, chunk, values, at_once)
    assert np.array_equal(total, functools.reduce(np.add, values))
    assert total.dtype == dtype
    assert all(map(np.array_equal, values, copies))
    assert not any(np.shares_memory(total, one) for one in values)


@pytest.mark.parametrize("workers", [1, 2, 4, 6])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_added_in_float32_and_rounded_once(workers: int, name: str) -> None:
    dtype = getattr(torch, name)
    tensors = [torch.from_numpy(one).to(dtype) for one in gradients(workers, 300)]
    expected = functools.reduce(torch.add, [one.float() for one in tensors]).to(dtype)
    stored = [t.numpy() if name == "float16" else t.view(torch.uint16).numpy() for t in tensors]
    adder, chunk = adder_of(300, name)
    total = torch.from_numpy(add(adder, chunk, stored)).view(dtype)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_means_in_half_precision_are_divided_in_float32_and_rounded_once(name: str) -> None:
    dtype = getattr(torch, name)
    # The sum of float16 overflows, the mean does not.
    tensors = [torch.full((9,), value).to(dtype) for value in (60000.0, 50001.0, 30003.0)]
    tensors = [one + torch.arange(9).to(dtype) for one in tensors]
    expected = (functools.reduce(torch.add, [one.float() for one in tensors]) / 3).to(dtype)
    assert expected.isfinite().all()
    stored = [t.numpy() if name == "float16" else t.view(torch.uint16).numpy() for t in tensors]
    adder, chunk = adder_of(9, name, divisor=3)
    mine = stored[0].copy()
    adder.open(mine, lambda: None, lambda _: None)
    sent = adder.encode(chunk, adder.add(chunk, stored, None))
    adder.land(chunk, *sent)
    assert np.array_equal(mine, sent.payload)
    assert torch.equal(torch.from_numpy(mine).view(dtype), expected)


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_bfloat16_rounds_as_torch_does(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    ours = torch.from_numpy(FORMATS["bfloat16"].narrow(values)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_infinite_gradients_raise_no_warnings() -> None:
    infinite = np.array([np.inf, 3e38], np.float32)
    adder, chunk = adder_of(2)
    assert np.isnan(add(adder, chunk, [infinite, -infinite, infinite])[0])


def test_memory_of_a_sum_comes_back_when_nobody_refers_to_it() -> None:
    length = 1 << 16
    pool = Pool()
    adder, chunk = adder_of(length, pool=pool)
    values = gradients(2, length)
    total = add(adder, chunk, values)
    view = memoryview(total)
    assert pool.spare_bytes == 0
    del total
    assert pool.spare_bytes == 0
    view.release()
    del view
    assert pool.spare_bytes == 4 * length
    again = add(adder, chunk, values)
    assert pool.spare_bytes == 0
    assert np.array_equal(again, values[0] + values[1])


def test_sums_are_kept_until_everybody_has_them_and_then_used_again() -> None:
    length = 1 << 15
    team, (slot,), network = make_team("host", 2, [8 * length], chunk_values=length)
    pool = team[0].adders[0]._pool  # type: ignore[attr-defined]
    for step in range(3):
        values = [np.full(8 * length, rank + step + 0.1, np.float32) for rank in range(2)]
        total = values[0] + values[1]
        for worker, mine in zip(team, values, strict=True):
            worker.start(mine, slot, step)
        network.pump()
        assert all(np.array_equal(mine, total) for mine in values)
        # All four sums were under way at once, and none more was needed later.
        assert pool.spare_bytes == 4 * 4 * length


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown number format 'int8'; known: bfloat16, float16, float32, float64"):
        host_adders([Slot(0, (), 0)], ["int8"], 0)
