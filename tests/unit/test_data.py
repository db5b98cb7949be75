"""Samplers that know their position: every sample once, on any number of workers, from any batch on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from poseidon.data.samplers import ElasticSampler, ElasticStream, cut_epoch, share
from poseidon.errors import ConfigError

LENGTH, BATCH = 103, 12
DATA = TensorDataset(torch.arange(LENGTH))


def flat(steps: Iterable[list[int]]) -> list[int]:
    return [*itertools.chain.from_iterable(steps)]


def _loaders(size: int, helpers: int = 0, **options: Any) -> list[tuple[ElasticSampler, DataLoader[Any]]]:
    samplers = [ElasticSampler(DATA, BATCH, rank=rank, size=size, **options) for rank in range(size)]
    return [(one, DataLoader(DATA, batch_sampler=one, num_workers=helpers)) for one in samplers]


def _take(team: list[tuple[Any, Any]], steps: int | None = None) -> list[list[int]]:
    """Return the samples of each step, by all workers together."""
    taken: list[list[int]] = []
    for sampler, loader in team:
        for number, (batch,) in enumerate(sampler.over(loader)):
            if number == len(taken):
                taken.append([])
            taken[number] += batch.tolist()
            if number + 1 == steps:
                break
    return taken


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_an_epoch_has_every_sample_once_in_the_same_batches_on_any_number_of_workers(size: int, shuffle: bool) -> None:
    steps = _take(_loaders(size, shuffle=shuffle))
    assert sorted(flat(steps)) == list(range(LENGTH))
    assert steps == _take(_loaders(1, shuffle=shuffle))
    assert (steps == sorted(steps)) is not shuffle


@pytest.mark.parametrize("helpers", [0, 2])
def test_a_position_continues_on_another_number_of_workers(helpers: int) -> None:
    whole = _take(_loaders(1))
    team = _loaders(3, helpers)
    begun = _take(team, steps=4)
    (state,) = {str(sampler.state_dict()) for sampler, _ in team}
    assert "'done': 4" in state  # although helpers have fetched more
    later = _loaders(2)
    for sampler, _ in later:
        sampler.load_state_dict(team[0][0].state_dict())
    assert begun + _take(later) == whole
    for sampler, _ in later:
        assert (sampler.epoch, sampler.done) == (1, 0)
    again = _take(later)
    assert sorted(flat(again)) == list(range(LENGTH))
    assert again != whole


def test_weights_make_the_workers_mean_that_of_all_samples() -> None:
    values = torch.randn(LENGTH, dtype=torch.float64)
    team = [(sampler, sampler.over(loader)) for sampler, loader in _loaders(5)]
    for _ in range(len(team[0][0])):
        parts = [(next(batches)[0], sampler.weight) for sampler, batches in team]
        together = torch.cat([indices for indices, _ in parts])
        mean = sum(values[indices].mean() * weight for indices, weight in parts) / 5
        assert torch.isclose(torch.as_tensor(mean), values[together].mean())


def test_what_is_not_counted_or_dealt_otherwise_is_refused() -> None:
    (sampler, loader), *_ = _loaders(2)
    next(iter(loader))
    with pytest.raises(ConfigError, match=r"iterate over sampler.over\(loader\)"):
        sampler.state_dict()
    (other, _), *_ = _loaders(2, seed=4)
    fresh = _loaders(2)[0][0]
    with pytest.raises(ConfigError, match="ElasticSampler has seed=0, but the position was saved with 4"):
        fresh.load_state_dict(other.state_dict())
    for size in (0, 2.5, True):
        with pytest.raises(ConfigError, match=r"batch_size=.*expected a whole number"):
            ElasticSampler(DATA, size)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size=2 for 3 workers"):
        ElasticSampler(DATA, 2, rank=0, size=3)
    with pytest.raises(ConfigError, match="103 samples make no batch of 200 for 2 workers; without drop_last"):
        ElasticSampler(DATA, 200, rank=0, size=2, drop_last=True)
    with pytest.raises(ConfigError, match="give both or none"):
        ElasticSampler(DATA, 2, rank=0)


@given(st.integers(1, 400), st.integers(1, 50), st.integers(1, 9), st.booleans())
def test_shares_and_cuts_cover_everything_once(length: int, batch: int, size: int, drop_last: bool) -> None:
    if batch < size or length < size or (drop_last and length < batch):
        return
    cuts = cut_epoch(length, batch, size, drop_last)
    assert cuts[0] == 0
    assert cuts[-1] == (length - length % batch if drop_last else length)
    for start, stop in itertools.pairwise(cuts):
        assert size <= stop - start < batch + size
        shares = [share(start, stop, rank, size) for rank in range(size)]
        assert [one for mine in shares for one in mine] == list(range(start, stop))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


class Numbers(IterableDataset[Tensor]):
    """A stream."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(LENGTH))


def _streams(size: int, helpers: int) -> list[tuple[ElasticStream, DataLoader[Any]]]:
    streams = [ElasticStream(Numbers(), BATCH, rank=rank, size=size) for rank in range(size)]
    return [(one, DataLoader(one, batch_size=None, num_workers=helpers)) for one in streams]


def _read(team: list[tuple[ElasticStream, DataLoader[Any]]], steps: int | None = None) -> list[list[int]]:
    counted = [(stream, [(batch,) for batch in _some(stream, loader, steps)]) for stream, loader in team]
    numbers = range(len(counted[0][1]))
    return [flat(batches[number][0].tolist() for _, batches in counted) for number in numbers]


def _some(stream: ElasticStream, loader: DataLoader[Any], steps: int | None) -> list[Tensor]:
    taken = []
    for batch in stream.over(loader):
        taken.append(batch)
        if len(taken) == steps:
            break
    return taken


@pytest.mark.parametrize("helpers", [0, 2])
def test_a_stream_is_dealt_in_order_and_continues(helpers: int) -> None:
    whole = _read(_streams(1, 0))
    assert flat(whole) == list(range(LENGTH))
    team = _streams(3, helpers)
    begun = _read(team, steps=3)
    later = _streams(2, helpers)
    for stream, _ in later:
        stream.load_state_dict(team[1][0].state_dict())
    assert begun + _read(later) == whole


class Sharing(IterableDataset[Tensor]):
    """A stream that divides itself between a loader's processes, as torch's documentation shows."""

    def __iter__(self) -> Iterator[Tensor]:
        helper = get_worker_info()
        start, step = (0, 1) if helper is None else (helper.id, helper.num_workers)
        return iter(torch.arange(start, LENGTH, step))


@pytest.mark.parametrize("helpers", [0, 2])
def test_a_stream_that_divides_itself_between_processes_is_read_whole(helpers: int) -> None:
    streams = [ElasticStream(Sharing(), BATCH, rank=rank, size=2) for rank in range(2)]
    team = [(one, DataLoader(one, batch_size=None, num_workers=helpers)) for one in streams]
    assert flat(_read(team)) == list(range(LENGTH))


def test_what_can_be_read_once_only_is_no_stream() -> None:
    with pytest.raises(ConfigError, match="a generator can be read once only"):
        ElasticStream((number for number in range(9)), 3, rank=0, size=1)


def test_going_on_in_an_epoch_draws_as_the_undisturbed_one_does() -> None:
    def draws(done: int) -> list[float]:
        sampler = ElasticSampler(range(LENGTH), BATCH, rank=0, size=1)  # type: ignore[arg-type]
        loader = DataLoader(torch.arange(LENGTH), batch_sampler=sampler)  # type: ignore[arg-type]
        found = []
        if not done:
            torch.manual_seed(3)
        else:
            sampler.load_state_dict(kept["sampler"])
            torch.set_rng_state(kept["random"])
        for _ in sampler.over(loader):
            found.append(torch.rand(()).item())
            if not done and len(found) == 2:
                kept.update(sampler=sampler.state_dict(), random=torch.get_rng_state())
        return found

    kept: dict[str, Any] = {}
    whole = draws(0)
    assert draws(2) == whole[2:]


@pytest.mark.parametrize("helpers", [0, 2])
def test_the_weights_of_a_stream_make_the_mean_exact(helpers: int) -> None:
    (alone,) = [[*batches] for batches in [_some(*_streams(1, 0)[0], None)]]
    team = _streams(3, helpers)
    parts = [[batch.double().mean() * stream.weight for batch in stream.over(loader)] for stream, loader in team]
    assert len(parts[0]) == len(alone)
    for means, whole in zip(zip(*parts, strict=True), alone, strict=True):
        assert float(sum(means)) / 3 == pytest.approx(float(whole.double().mean()), rel=1e-12)


def test_a_stream_does_not_guess_a_weight() -> None:
    stream = ElasticStream(Numbers(), BATCH, rank=0, size=3)
    next(stream.over(batch for batch in DataLoader(stream, batch_size=None)))
    with pytest.raises(ConfigError, match="how large a batch is"):
        _ = stream.weight


def _next(sampler: ElasticSampler, steps: int) -> Iterator[tuple[list[int], float]]:
    """Yield this worker's samples of some steps, and their weights."""
    batches = sampler.over(sampler)
    for _, mine in zip(range(steps), batches, strict=False):
        yield mine, sampler.weight
    batches.close()  # type: ignore[attr-defined]


@given(
    st.integers(20, 150),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=8),
    st.sampled_from(["per-worker", "total"]),
)
def test_every_sample_comes_once_while_workers_come_and_go(
    length: int, batch: int, turns: list[tuple[int, int]], fixed: str
) -> None:
    most = max(size for size, _ in turns)
    if fixed == "total" and batch < most:
        return
    seen, epoch, state = [], 0, None
    for size, steps in [*turns, (most, 1000)]:
        team = [ElasticSampler(range(length), batch, rank=r, size=size, fixed_batch=fixed) for r in range(size)]
        for sampler in team:
            sampler._most = most
            sampler._recut()
            if state is not None:
                sampler.load_state_dict(state)
        parts = [list(_next(sampler, steps)) for sampler in team]
        assert len({len(part) for part in parts}) == 1
        for shares in zip(*parts, strict=True):
            total = sum(len(mine) for mine, weight in shares)
            assert all(weight == pytest.approx(len(mine) * size / total) for mine, weight in shares)
            seen += flat(mine for mine, _ in shares)
            is_last = len(seen) == length
            if fixed == "per-worker" and not is_last:
                assert {len(mine) for mine, _ in shares} == {batch}
        state, epoch = team[0].state_dict(), team[0].epoch
        assert [sampler.state_dict() for sampler in team] == [state] * size
        if epoch:
            break
    assert (sorted(seen), epoch) == (list(range(length)), 1)


def test_a_worker_without_a_share_goes_through_the_motions_with_weight_0() -> None:
    begun = ElasticSampler(range(10), 8, rank=0, size=1, shuffle=False)
    assert len([*itertools.islice(begun.over(begun), 1)]) == 1
    team = [ElasticSampler(range(10), 8, rank=rank, size=3, shuffle=False) for rank in range(3)]
    for sampler in team:
        sampler.load_state_dict(begun.state_dict())
    assert [[*_next(sampler, 5)] for sampler in team] == [[([8], 0.0)], [([8], 1.5)], [([9], 1.5)]]


def test_options_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="balance=True with rank= and size="):
        ElasticSampler(DATA, BATCH, rank=0, size=2, balance=True)
    with pytest.raises(ConfigError, match=r'balance with fixed_batch="per-worker".*choose one'):
        ElasticSampler(DATA, BATCH, balance=True, fixed_batch="per-worker")
    with pytest.raises(ConfigError, match="fixed_batch='worker', expected 'total' or 'per-worker'"):
        ElasticSampler(DATA, BATCH, fixed_batch="worker")
    with pytest.raises(ConfigError, match="balance_max=0, expected a whole number"):
        ElasticSampler(DATA, BATCH, balance=True, balance_max=0)
    monkeypatch.setenv("POSEIDON_FIXED_BATCH", "per-worker")
    monkeypatch.setenv("POSEIDON_BALANCE_MAX", "7")
    assert len(ElasticSampler(DATA, BATCH, rank=0, size=2)) == 5
    saved = ElasticSampler(DATA, BATCH, rank=0, size=2).state_dict()
    with pytest.raises(ConfigError, match="fixed_batch='total', but the position was saved with 'per-worker'"):
        ElasticSampler(DATA, BATCH, rank=0, size=2, fixed_batch="total").load_state_dict(saved)
    monkeypatch.delenv("POSEIDON_FIXED_BATCH")
    alone = ElasticSampler(DATA, BATCH, balance=True)
    with pytest.raises(ConfigError, match="a batch of 12 samples, but the workers hold at most 7"):
        next(iter(alone.over(alone)))


def test_a_balanced_sampler_of_one_worker_has_everything_and_equals_a_plain_one() -> None:
    balanced, plain = ElasticSampler(DATA, BATCH, balance=True), ElasticSampler(DATA, BATCH, balance=False)
    assert [*_next(balanced, 99)] == [*_next(plain, 99)]
    assert balanced.state_dict() == plain.state_dict()


def test_a_loader_of_something_else_is_noticed() -> None:
    sampler = ElasticSampler(DATA, BATCH, rank=0, size=2)
    with pytest.raises(ConfigError, match="more than the 9 batches of an epoch"):
        [*sampler.over(range(10))]


def test_a_stream_per_worker_continues_with_other_workers() -> None:
    team = [ElasticStream(Numbers(), 4, rank=rank, size=3, fixed_batch="per-worker") for rank in range(3)]
    begun = [_some(one, DataLoader(one, batch_size=None), 2) for one in team]
    assert {len(batch) for batches in begun for batch in batches} == {4}
    later = [ElasticStream(Numbers(), 4, rank=rank, size=2, fixed_batch="per-worker") for rank in range(2)]
    for stream in later:
        stream.load_state_dict(team[0].state_dict())
    rest = [_some(one, DataLoader(one, batch_size=None), None) for one in later]
    assert sorted(flat(batch.tolist() for batches in (*begun, *rest) for batch in batches)) == list(range(LENGTH))
