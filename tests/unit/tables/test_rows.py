from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ServerError
from poseidon.tables.importance import most_changed
from poseidon.tables.inbox import Inbox
from poseidon.tables.rows import DenseRows, Patch, SparseRows, combine, combine_columns, sparse_patch
from poseidon.tables.table_messages import read_patch, read_rows, write_patch, write_rows
from poseidon.tables.tables import TableSpec

WIDTH = 6


def dense(rows: list[int], seed: int = 0) -> Patch:
    values = np.random.default_rng(seed).integers(-9, 10, (len(rows), WIDTH)).astype(np.float32)
    return Patch(np.array(rows, np.int64), values)


def sparse(contents: dict[int, dict[int, float]]) -> Patch:
    rows = np.array(list(contents), np.int64)
    pairs = [
        (np.array(sorted(row), np.int64), np.array([row[c] for c in sorted(row)], np.float32))
        for row in contents.values()
    ]
    return sparse_patch(rows, pairs, np.empty(0, np.float32))


def as_dicts(patch: Patch) -> dict[int, dict[int, float]]:
    assert patch.columns is not None
    assert patch.starts is not None
    return {
        int(row): dict(
            zip(
                patch.columns[patch.starts[i] : patch.starts[i + 1]].tolist(),
                patch.values[patch.starts[i] : patch.starts[i + 1]].tolist(),
                strict=True,
            )
        )
        for i, row in enumerate(patch.rows)
    }


sparse_contents = st.dictionaries(
    st.integers(0, 20), st.dictionaries(st.integers(0, WIDTH - 1), st.integers(-9, 9).map(float)), max_size=6
)


@given(st.lists(st.lists(st.integers(0, 11), unique=True, max_size=12), max_size=5), st.integers(1, 4))
def test_dense_rows_add_like_one_array_whatever_the_stride(changes: list[list[int]], stride: int) -> None:
    expected = np.zeros((12, WIDTH), np.float32)
    parts = [DenseRows(12, WIDTH, "float32", stride, offset) for offset in range(stride)]
    for seed, rows in enumerate(changes):
        patch = dense(rows, seed)
        expected[patch.rows] += patch.values
        for offset, part in enumerate(parts):
            part.add(patch.select(np.flatnonzero(patch.rows % stride == offset)))
    for offset, part in enumerate(parts):
        mine = part.touched()
        assert mine.tolist() == list(range(offset, 12, stride))
        assert np.array_equal(part.take(mine).values, expected[offset::stride])


def test_what_was_taken_does_not_change_with_the_rows() -> None:
    rows = DenseRows(4, WIDTH, "float32")
    before = rows.take(np.arange(4))
    rows.add(dense([0, 1, 2, 3]))
    assert not before.values.any()


@given(st.lists(sparse_contents, max_size=4))
def test_sparse_rows_add_like_dictionaries(changes: list[dict[int, dict[int, float]]]) -> None:
    store = SparseRows("float32")
    expected: dict[int, dict[int, float]] = {}
    for change in changes:
        store.add(sparse(change))
        for row, content in change.items():
            mine = expected.setdefault(row, {})
            for column, value in content.items():
                mine[column] = mine.get(column, 0.0) + value
    assert store.touched().tolist() == sorted(expected)
    assert as_dicts(store.take(store.touched())) == expected
    store.clear(store.touched()[:1])
    assert len(store.touched()) == max(0, len(expected) - 1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_repeated_rows_and_columns_add_up(rows: list[int]) -> None:
    values = np.arange(len(rows) * WIDTH, dtype=np.float64).reshape(-1, WIDTH)
    expected = np.zeros((6, WIDTH))
    np.add.at(expected, rows, values)
    patch = combine(np.array(rows), values)
    assert patch.rows.tolist() == sorted(set(rows))
    assert np.array_equal(patch.values, expected[patch.rows])
    columns, sums = combine_columns(np.array(rows), values[:, 0])
    assert columns.tolist() == sorted(set(rows))
    assert np.array_equal(sums, expected[columns, 0])


@given(sparse_contents)
def test_patches_say_how_large_their_rows_are_and_split_into_whole_rows(contents: dict[int, dict[int, float]]) -> None:
    patch = sparse(contents)
    assert patch.size_of_rows().tolist() == [sum(map(abs, row.values())) for row in contents.values()]
    pieces = list(patch.split(40))
    assert {row: content for piece in pieces for row, content in as_dicts(piece).items()} == contents
    assert len(pieces) == 1 or all(len(piece) for piece in pieces)
    assert as_dicts(patch.within(np.arange(0, 20, 2))) == {r: c for r, c in contents.items() if r % 2 == 0 and r < 20}


def test_dense_patches_split_at_rows() -> None:
    patch = dense(list(range(10)))
    pieces = list(patch.split(100))
    assert max(piece.nbytes for piece in pieces) <= 100
    assert np.array_equal(np.concatenate([piece.values for piece in pieces]), patch.values)
    assert len(list(patch.split(1))) == 10


def test_the_largest_relative_change_goes_first() -> None:
    changes = np.array([1.0, 0.0, 5.0, 1.0, 3.0])
    sizes = np.array([10.0, 0.0, 100.0, 0.0, 6.0])
    assert most_changed(changes, sizes, 10).tolist() == [3, 4, 0, 2]
    assert most_changed(changes, sizes, 2).tolist() == [3, 4]
    assert most_changed(np.zeros(3), np.ones(3), 3).tolist() == []


@given(st.permutations(list(range(8))))
def test_an_inbox_restores_the_order_of_sending(order: list[int]) -> None:
    inbox = Inbox[int](3)
    assert [one for number in order for one in inbox.put(number, number)] == list(range(8))
    with pytest.raises(ServerError, match="rank 3 sent message 2; expected 8"):
        inbox.put(2, 2)
    with pytest.raises(ServerError, match="message 1000000"):
        inbox.put(1_000_000, 0)


@given(st.sets(st.integers(0, 20), max_size=9))
def test_dense_patches_survive_the_wire(rows: set[int]) -> None:
    patch = dense(sorted(rows))
    content = read_patch(TableSpec("t", 21, WIDTH), write_patch(2, 7, patch).data)
    assert (content.place, content.included) == (2, 7)
    assert np.array_equal(content.patch.rows, patch.rows)
    assert np.array_equal(content.patch.values, patch.values)
    assert read_rows(write_rows(1, patch.rows).data)[1].tolist() == sorted(rows)


@given(sparse_contents)
def test_sparse_patches_survive_the_wire(contents: dict[int, dict[int, float]]) -> None:
    spec = TableSpec("t", 21, WIDTH, sparse=True)
    assert as_dicts(read_patch(spec, write_patch(0, 0, sparse(contents)).data).patch) == contents


@given(st.binary(max_size=200), st.booleans(), st.data())
def test_garbage_is_refused_or_makes_a_sound_patch(noise: bytes, is_sparse: bool, data: Any) -> None:
    spec = TableSpec("t", 21, WIDTH, sparse=is_sparse)
    good = bytearray(write_patch(0, 0, sparse({3: {1: 2.0}, 4: {}}) if is_sparse else dense([3, 4])).tobytes())
    place = data.draw(st.integers(0, len(good)))
    good[place : place + len(noise)] = noise
    for payload in (noise, bytes(good)):
        try:
            patch = read_patch(spec, memoryview(payload)).patch
        except ServerError:
            continue
        assert len(patch.size_of_rows()) == len(patch.rows)
        assert (
            patch.columns is None or not len(patch.columns) or 0 <= patch.columns.min() <= patch.columns.max() < WIDTH
        )
