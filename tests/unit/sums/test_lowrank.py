from __future__ import annotations

import numpy as np
import pytest

from poseidon.sums.lowrank import host_digest, is_finite, orthonormalize, split_bucket, sum_of_sizes


def test_a_bucket_is_split_without_gaps() -> None:
    layout = split_bucket([600, 7, 120, 5], [(30, 20), None, (10, 12), None], 2)
    assert [one.place for one in layout.matrices] == [0, 2]
    assert [place for place, _ in layout.whole] == [1, 3]
    spans = [one.left for one in layout.matrices] + [place for _, place in layout.whole]
    taken = sorted(index for span in spans for index in range(span.start, span.stop))
    assert taken == list(range(layout.left_size))
    assert layout.left_size == 2 * (20 + 10) + 7 + 5
    assert [one.right for one in layout.matrices] == [slice(0, 60), slice(60, 84)]
    assert layout.right_size == 84


def test_the_shorter_factor_travels_first() -> None:
    layout = split_bucket([600, 120], [(30, 20), (10, 12)], 2)
    assert [(one.rows, one.columns, one.is_turned) for one in layout.matrices] == [(20, 30, True), (10, 12, False)]


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_columns_become_orthonormal_and_span_as_much(scale: float) -> None:
    generator = np.random.default_rng(3)
    before = generator.standard_normal((500, 4)).astype(np.float32) * np.float32(scale) * [1, 100, 1e-3, 1]
    before = before.astype(np.float32)
    left = before.copy()
    assert orthonormalize(left)
    np.testing.assert_allclose(left.T @ left, np.eye(4), atol=2e-6)
    wide = (before / np.abs(before).max(0)).astype(np.float64)
    np.testing.assert_allclose(left @ (left.T @ wide), wide, atol=1e-5)


def test_too_few_directions_and_none_are_no_problem() -> None:
    one = np.outer(np.arange(50), [1, 2, 0]).astype(np.float32)
    for left in (one, np.zeros((50, 3), np.float32)):
        assert orthonormalize(left)
        np.testing.assert_allclose(left.T @ left, np.eye(3), atol=2e-6)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_is_so_as_a_whole(bad: float) -> None:
    left = np.ones((6, 2), np.float32)
    left[3, 1] = bad
    assert not orthonormalize(left)
    assert np.isnan(left).all()


def test_the_same_machine_rounds_alike() -> None:
    assert host_digest() == host_digest()


def test_columns_of_zeros_and_what_is_not_finite_are_found() -> None:
    factor = np.full((40, 3), -1e-42, np.float32)
    factor[:, 1] = 0
    assert sum_of_sizes(factor).astype(bool).tolist() == [True, False, True]
    assert is_finite(sum_of_sizes(factor), factor)
    factor[7, 2] = np.nan
    assert not is_finite(sum_of_sizes(factor), factor)
    large = np.full((40, 2), 3e38, np.float32)
    assert np.isinf(sum_of_sizes(large)).all()
    assert is_finite(sum_of_sizes(large), large)
