"""Comparing replicas during training: what is covered when, and what changes a sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from poseidon.engine.replicas import PARTS, ReplicaCheck, Stretch, stretches_of
from poseidon.engine.rollcall import RollCall
from poseidon.engine.step import Verdict

LAG = 2


@pytest.mark.parametrize("sizes", [[4], [8], [4, 4, 4], [1000, 4, 12, 40_000], [2, 6, 3, 5] * 30, [64] * 3])
@pytest.mark.parametrize("parts", [1, 3, PARTS])
def test_parts_cover_every_byte_of_every_parameter_once(sizes: list[int], parts: int) -> None:
    seen = [[0] * size for size in sizes]
    for part in range(parts):
        for stretch in stretches_of(sizes, part, parts):
            assert stretch.start % 8 == 0
            for place in range(stretch.start, stretch.stop):
                seen[stretch.parameter][place] += 1
    assert seen == [[1] * size for size in sizes]


def test_parts_are_about_equal() -> None:
    sizes = [1000, 3000, 500, 96_000, 12]
    bytes_of = [sum(s.stop - s.start for s in stretches_of(sizes, part)) for part in range(PARTS)]
    assert max(bytes_of) - min(bytes_of) <= 16
    assert stretches_of(sizes, 0, 1) == [Stretch(number, 0, size) for number, size in enumerate(sizes)]


def digests(values: list[Tensor], steps: int, interval: int = 1) -> list[int]:
    check = ReplicaCheck(values, interval)
    return [check.words(step, is_joined=False)[0] for step in range(steps)]


FORMS = {
    "odd": torch.arange(7.0),
    "tiny": torch.ones(1),
    "half": torch.arange(11.0).half(),
    "bf16": torch.arange(13.0).bfloat16(),
    "double": torch.arange(9.0).double(),
    "complex": torch.arange(6.0).to(torch.complex128),
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "unaligned": torch.arange(10.0)[1:],
    "strided": torch.arange(20.0)[::2],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_bit_counts(form: str) -> None:
    value = FORMS[form]
    same = digests([value.clone(memory_format=torch.preserve_format)], LAG + 1)[-1]
    assert same == digests([value], LAG + 1)[-1] != 0
    for place in range(value.numel()):
        other = value.clone(memory_format=torch.preserve_format)
        index = np.unravel_index(place, other.shape)
        other[index] += 1
        assert digests([other], LAG + 1)[-1] != same, place
    assert digests([-torch.zeros(4)], LAG + 1)[-1] != digests([torch.zeros(4)], LAG + 1)[-1]


def test_the_whole_model_comes_first_and_then_part_by_part() -> None:
    weights = [torch.zeros(64) for _ in range(PARTS)]
    steps = LAG + 4 * PARTS + 8
    before = digests(weights, steps, interval=4)
    assert [place for place, digest in enumerate(before) if digest] == [LAG, *range(LAG + 4, steps, 4)]
    weights[3][5] = 1.0
    after = digests(weights, steps, interval=4)
    changed = [place for place in range(steps) if before[place] != after[place]]
    assert changed == [LAG, LAG + 4 * 3], "the first step, and the turn of the part"


def test_the_whole_model_is_due_after_a_request_or_an_odd_change() -> None:
    weights = [torch.zeros(64), torch.zeros(64)]
    for reason in ("asked", "changed", "nothing"):
        check = ReplicaCheck(weights, 100)
        found = [check.words(step, is_joined=False) for step in range(111)]
        assert sum(bool(digest) for digest, _, _ in found) == 2
        weights[1].add_(1)
        if reason == "asked":
            check.ask()
        _, changes, asks = check.words(111, is_joined=False)
        assert changes == 1
        assert asks == (reason == "asked")
        check.hear(111, [changes, 0 if reason == "changed" else changes], [asks, False])
        later = [check.words(step, is_joined=False)[0] for step in range(112, 117)]
        assert bool(any(later)) == (reason != "nothing")


def test_a_worker_without_input_compares_nothing_but_stays_in_step() -> None:
    active, joined = ReplicaCheck([torch.zeros(64)], 1), ReplicaCheck([torch.ones(64)], 1)
    pairs = [(active.words(step, False)[0], joined.words(step, step < 5)[0]) for step in range(5 + LAG)]
    assert [bool(digest) for _, digest in pairs] == [False] * (5 + LAG)
    assert joined.words(5 + LAG, False)[0] != active.words(5 + LAG, False)[0]


def test_workers_agree_on_what_is_due_after_one_had_no_input() -> None:
    values = torch.arange(64.0)
    active, late = ReplicaCheck([values], 4), ReplicaCheck([values.clone()], 4)
    pairs = [(active.words(step, False)[0], late.words(step, step < 6)[0]) for step in range(40)]
    assert all(one == other for one, other in pairs if one and other)
    assert sum(bool(other) for _, other in pairs) == 8


def test_no_interval_means_no_sum() -> None:
    check = ReplicaCheck([torch.zeros(8)], 0)
    assert [check.words(step, False) for step in range(4)] == [(0, 0, False)] * 4


def test_only_workers_with_input_and_a_sum_are_compared() -> None:
    def differing(*words: tuple[int, bool]) -> tuple[int, ...]:
        calls = tuple(RollCall(0, False, 8, is_joined, digest) for digest, is_joined in words)
        return Verdict(calls, {}, ()).differing

    assert differing((5, False), (5, False)) == ()
    assert differing((5, False), (6, False), (5, False)) == (1,)
    assert differing((5, False), (6, True), (0, False)) == ()
    assert differing((0, False), (0, False)) == ()
