"""When fragments leave and land, how a model is cut into them, and what local steps cost."""

from __future__ import annotations

from typing import Any

import pytest

from poseidon.errors import ConfigError
from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.local import LocalSchedule, cut_evenly, make_local_plan, read_interval
from toy_models import CONV, FC, TABLE


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (7, 1), (7, 3), (10, 4), (5, 5)])
def test_every_fragment_leaves_once_in_every_round_and_no_two_together(every: int, fragments: int) -> None:
    schedule = LocalSchedule(every, fragments=fragments)
    for start in (1, 1 + every, 1 + 3 * every):
        left = [schedule.leaving(step) for step in range(start, start + every)]
        assert [one for one in left if one is not None] == list(range(fragments))
    assert schedule.leaving(every) == fragments - 1, "the last one leaves at the end of the round"


def test_exchanges_are_spread_evenly_over_a_round() -> None:
    schedule = LocalSchedule(100, fragments=4)
    assert [step for step in range(1, 201) if schedule.leaving(step) is not None] == [
        25,
        50,
        75,
        100,
        125,
        150,
        175,
        200,
    ]


def test_a_fragment_has_seen_the_steps_since_it_left() -> None:
    schedule = LocalSchedule(10, fragments=2)
    assert [schedule.span(step) for step in (5, 10, 15, 20)] == [5, 10, 10, 10]
    assert schedule.next_leaving(0) == 5
    assert schedule.next_leaving(5) == 10


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0,), "sync_every"),
        ((-3,), "sync_every"),
        ((4, 0.0, 5), "fragments=5: expected 1 to sync_every=4"),
        ((4, 0.0, 0), "fragments=0"),
        ((4, 0.0, 1, 5), "overlap=5"),
        ((4, 0.0, 1, -1), "overlap=-1"),
        ((0, 30.0, 2), "counted in steps"),
        ((0, 30.0, 1, 1), "counted in steps"),
    ],
)
def test_schedules_that_cannot_be(arguments: tuple[float, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LocalSchedule(*arguments)  # type: ignore[arg-type]


def test_intervals_are_steps_or_times() -> None:
    assert read_interval(100) == (100, 0.0)
    assert read_interval("30s") == (0, 30.0)
    assert read_interval("0.5 s") == (0, 0.5)
    assert read_interval("2min") == (0, 120.0)
    for wrong in (0, -1, True, "30", "s", "0s", "-1s", 1.5, "1h"):
        with pytest.raises(ConfigError, match="sync_every is"):
            read_interval(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([8, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 8], 2, [3, 1]),
        ([5, 5, 5], 3, [1, 1, 1]),
        ([100, 1, 1], 3, [1, 1, 1]),
        ([1, 1, 100], 3, [1, 1, 1]),
        ([3, 3, 3, 3, 3], 2, [2, 3]),
        ([4], 1, [1]),
    ],
)
def test_models_are_cut_into_parts_of_about_equal_size(sizes: list[int], parts: int, expected: list[int]) -> None:
    cut = cut_evenly(sizes, parts)
    assert [len(part) for part in cut] == expected
    assert [place for part in cut for place in part] == list(range(len(sizes)))


def test_more_fragments_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="fragments=3: the model has 2 layers"):
        cut_evenly([1, 1], 3)


def test_the_plan_says_what_is_exchanged_and_predicts_steps() -> None:
    cluster = Cluster(4, between=Link(1e8, 1e-4))
    units = [CONV, FC, TABLE]
    size = sum(unit.size_bytes for unit in units)
    plan = make_local_plan(units, cluster, LocalSchedule(50), extra_bytes=16)
    assert str(plan).startswith(f"local steps, exchange every 50 steps, {(size + 16) / 1e3:.3g} kB each time")
    assert plan.routes == dict.fromkeys(("conv", "fc", "table"), "local")
    assert plan.round_bytes == 2 * size * 3 / 4
    assert plan.wire_bytes == plan.round_bytes / 50
    assert plan.round_s > 2 * size * 3 / 4 / (1e8 / 8)
    assert plan.step_s(1.0) == pytest.approx(1.0 + plan.round_s / 50)


def test_what_overlaps_is_not_waited_for() -> None:
    cluster = Cluster(4, between=Link(1e5, 1e-4))
    wait_s = make_local_plan([FC, FC], cluster, LocalSchedule(10)).round_s
    streaming = make_local_plan([FC, FC], cluster, LocalSchedule(10, fragments=2, overlap=3))
    assert streaming.round_s == wait_s
    assert streaming.step_s(wait_s / 6) == wait_s / 6, "half of it is hidden by three steps"
    assert streaming.step_s(wait_s / 12) == pytest.approx(wait_s / 12 + 2 * (wait_s / 2 - wait_s / 4) / 10)


def test_a_fragment_with_a_large_layer_is_waited_for_longer() -> None:
    cluster = Cluster(4, between=Link(1e5, 1e-4))
    plan = make_local_plan([FC, FC, FC, FC], cluster, LocalSchedule(10, fragments=3, overlap=3))
    short, *_ = sorted(plan.fragments_s)
    assert sorted(plan.fragments_s) == pytest.approx([short, short, 2 * short])
    assert plan.step_s(short / 3) == pytest.approx(short / 3 + short / 10), "what is twice as long is half hidden"


@pytest.mark.parametrize(
    ("machines", "options", "far", "near"),
    [
        (1, {}, 0, 2 * 7 / 8),  # every worker's part to every other, and sums back
        (2, {}, 2 / 2, 2 * 3 / 4),  # combined first
        (2, {"combines_first": False}, 4 * 2 / 2, 2 * 3 / 8),
        (2, {"share": 0.25, "lossy": "int8"}, 2 / 2, 2 * 3 / 8 / 4),
    ],
)
def test_workers_of_one_machine_exchange_inside_it(
    machines: int, options: dict[str, Any], far: float, near: float
) -> None:
    cluster = Cluster(machines, 8 // machines, between=Link(1e9, 0.0), inside=Link(1e8, 0.0))
    plan = make_local_plan([FC], cluster, LocalSchedule(10), **options)
    size = FC.size_bytes
    assert plan.round_s == pytest.approx(far * size / 1e9 * 8 + near * size / 1e8 * 8)
    assert plan.round_bytes == pytest.approx(size * (far or near))


def test_half_precision_is_exchanged_in_float32() -> None:
    from dataclasses import replace

    half = replace(FC, parameters=tuple(replace(p, itemsize=2) for p in FC.parameters))
    schedule = LocalSchedule(5)
    cluster = Cluster(2)
    assert (
        make_local_plan([half], cluster, schedule).exchanged_bytes
        == make_local_plan([FC], cluster, schedule).exchanged_bytes
    )
