"""The front end for other frameworks, with plain arrays in their place: means over samples, in every form."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from poseidon.engine.moments import combine
from poseidon.engine.outside import (
    NO_STEP,
    ExchangeOptions,
    OutsideFrontEnd,
    OutsideUnit,
    OutsideVariable,
    Rows,
    SummingChannel,
    as_tensor,
    check_alike,
    step_weight,
    take_from_first,
)
from poseidon.errors import MismatchError, UnsupportedError
from poseidon.team.team import Team
from ranks import run_ranks

VARIABLES = [
    OutsideVariable("kernel", (6, 4), "float64"),
    OutsideVariable("bias", (4,), "float64"),
    OutsideVariable("table", (9, 3), "float64"),
    OutsideVariable("small table", (5, 2), "float64"),
    OutsideVariable("scale", (), "float64"),
    OutsideVariable("idle", (2,), "float64"),
]
UNITS = [
    OutsideUnit("dense", "linear", (0,)),
    OutsideUnit("dense/bias", "dense", (1,)),
    OutsideUnit("table", "embedding", (2,), is_sparse=True),
    OutsideUnit("small", "embedding", (3,)),
    OutsideUnit("rest", "dense", (4, 5)),
]


def test_a_step_counts_samples_not_workers() -> None:
    assert step_weight(4, [4, 4]) == 1.0
    assert [step_weight(n, [3, 1, 0]) for n in (3, 1, 0)] == [9 / 4, 3 / 4, 0.0]
    with pytest.raises(MismatchError, match="worker 1 has ended its epoch while worker 0 has a batch left"):
        step_weight(4, [4, NO_STEP])
    with pytest.raises(UnsupportedError, match="no worker has a sample"):
        step_weight(0, [0, 0])


def test_arrays_are_seen_not_copied() -> None:
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    tensor = as_tensor(array)
    assert tensor.data_ptr() == array.ctypes.data
    assert as_tensor(array[:, ::2]).tolist() == [[0.0, 2.0], [3.0, 5.0]]
    assert as_tensor(np.array(3.0)).shape == ()


def _data(rank: int, step: int) -> tuple[int, list[Any]]:
    """What a worker brings to a step: a number of samples, and a gradient for each variable, a mean over them."""
    generator = np.random.default_rng([rank, step])
    samples = [5, 5, 2, 0][(rank + step) % 4] if step > 1 else 5
    rows = max(samples, 1)
    x, g = generator.normal(size=(rows, 6)), generator.normal(size=(rows, 4)) / rows
    numbers = [generator.integers(0, count, 7) for count in (9, 5)]
    values = [generator.normal(size=(7, width)) for width in (3, 2)]
    return samples, [(x, g), g.sum(0), (numbers[0], values[0]), (numbers[1], values[1]), generator.normal(size=())]


def _dense(given: list[Any]) -> list[Any]:
    (x, g), bias, *tables, scale = given
    full = []
    for (numbers, values), shape in zip(tables, ((9, 3), (5, 2)), strict=True):
        table = np.zeros(shape)
        np.add.at(table, numbers, values)
        full.append(table)
    return [x.T @ g, bias, *full, scale]


def _expected(size: int, step: int) -> list[Any]:
    brought = [_data(rank, step) for rank in range(size)]
    total = sum(samples for samples, _ in brought)
    return [
        sum(samples / total * part for (samples, _), part in zip(brought, parts, strict=True))
        for parts in zip(*(_dense(given) for _, given in brought), strict=True)
    ]


def _train(routes: dict[str, str] | None) -> tuple[float, list[bytes], dict[str, str]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    team = Team(None, 60.0)
    check_alike(team, VARIABLES)
    (start,) = take_from_first(team, [np.full((2, 2), rank)])
    assert (start == 0).all()
    front = OutsideFrontEnd(team, VARIABLES, UNITS, ExchangeOptions(routes=routes, timeout_s=60.0))
    worst, bits = 0.0, []
    for step in range(5):
        samples, given = _data(rank, step)
        if not samples:  # a mean over nothing
            given = [np.full_like(one, np.nan) if not isinstance(one, tuple) else one for one in given]
            (x, g), _, (rows, values), *_ = given
            given[0], given[2] = (x * np.nan, g * np.nan), (rows, values * np.nan)
        front.begin(samples, unused=[5])
        _give_from_threads(front, given)
        front.finish()
        means = [front.mean(position) for position in range(5)]
        bits.append(b"".join(_full(mean).tobytes() for mean in means))
        expected = _expected(size, step)
        worst = max(worst, *(np.abs(_full(m) - e).max() for m, e in zip(means, expected, strict=True)))
        assert isinstance(means[2], Rows)
        for mean in means:  # they are ours: what is written into them must not come back
            if not isinstance(mean, Rows):
                mean.fill(np.nan)
    plan = front.plan
    assert plan is not None
    front.close()
    return worst, bits, dict(plan.routes)


def _full(mean: Any) -> Any:
    if not isinstance(mean, Rows):
        return mean
    table = np.zeros((9, 3))
    table[mean.numbers] = mean.values
    return table


def _give_from_threads(front: OutsideFrontEnd, given: list[Any]) -> None:
    (x, g), bias, table, small, scale = given
    calls = [
        lambda: front.give(4, scale),
        lambda: front.give_rows(3, *small),
        lambda: front.give_rows(2, *table),
        lambda: front.give(1, bias),
        lambda: front.give_factors(0, [(x[:1], g[:1]), (x[1:], g[1:])]),
    ]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("routes", [None, {"dense": "factors", "small": "rows"}])
def test_means_are_those_of_all_samples(routes: dict[str, str] | None) -> None:
    results = run_ranks(_train, 3, routes)
    assert max(worst for worst, _, _ in results) < 1e-12
    assert all(bits == results[0][1] for _, bits, _ in results)
    assert results[0][2]["table"] == "rows"
    if routes:
        assert {unit: results[0][2][unit] for unit in routes} == routes


def _differ() -> str:
    team = Team(None, 60.0)
    with pytest.raises(MismatchError) as caught:
        check_alike(team, [OutsideVariable("kernel", (2, 3 + dist.get_rank()), "float32")])
    team.close()
    return str(caught.value)


def test_different_models_are_named() -> None:
    assert "kernel has shape [2, 3] on rank 0 and [2, 4] on rank 1" in run_ranks(_differ, 2)[1]


def test_a_worker_without_rows_leaves_the_moments_of_the_others_alone() -> None:
    rows = np.array([[1.0, -2.0], [4.0, 0.5], [2.5, 3.0]])
    mine = np.concatenate([[3.0], rows.mean(0), rows.var(0)])
    nobody = np.array([0.0, *[np.nan] * 4])
    for rank, share in enumerate((0.0, 1.0)):
        mean, variance, found = combine(np.stack([nobody, mine]), rank)
        assert found == share
        np.testing.assert_allclose(mean, rows.mean(0))
        np.testing.assert_allclose(variance, rows.var(0))


def _sum_up() -> list[Any]:
    channel = SummingChannel(Team(None, 20.0))
    rank = dist.get_rank()
    arrays = [np.full((2, 3), 10.0**rank, np.float32), np.float64(rank + 0.5), np.zeros((0, 4), np.float32)]
    # Transposed: not contiguous.
    arrays.append(np.arange(6, dtype=np.float64).reshape(2, 3).T * rank)
    return [channel.sum(array, "the test") for array in arrays]


def test_sums_in_the_middle_of_a_step_are_the_same_everywhere() -> None:
    for sums in run_ranks(_sum_up, 3, env={"POSEIDON_WIRE_ENCRYPT": "1"}):
        full, number, empty, turned = sums
        assert full.dtype == np.float32
        assert np.array_equal(full, np.full((2, 3), 111, np.float32))
        assert number == 4.5
        assert empty.shape == (0, 4)
        assert np.array_equal(turned, 3.0 * np.arange(6).reshape(2, 3).T)
