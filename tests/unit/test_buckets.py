import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from poseidon.planning.packing import SMALLEST_BUCKET_BYTES, assign_buckets, limit_collective, limit_served
from poseidon.routes.buckets import Bucket
from poseidon.sums.slots import CHUNK_S, LARGEST_CHUNK_BYTES, SMALLEST_CHUNK_BYTES, WHOLE_CHUNK_S, chunk_bytes_for

MB = 2**20
SIZES = st.lists(st.tuples(st.sampled_from(["f32", "f16"]), st.integers(0, 40 * MB)), max_size=40)
LIMITS = st.integers(0, 64 * MB)


@given(SIZES, LIMITS)
def test_buckets_are_a_partition_of_one_kind_each(sizes: list[tuple[str, int]], limit: int) -> None:
    buckets = assign_buckets(sizes, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket == sorted(bucket)
        assert len({sizes[index][0] for index in bucket}) == 1


@given(SIZES, LIMITS)
def test_buckets_come_in_the_order_in_which_they_are_complete(sizes: list[tuple[str, int]], limit: int) -> None:
    lasts = [bucket[-1] for bucket in assign_buckets(sizes, limit)]
    assert lasts == sorted(lasts)


@given(SIZES, LIMITS)
def test_a_bucket_exceeds_its_limit_by_its_last_item_only(sizes: list[tuple[str, int]], limit: int) -> None:
    for bucket in assign_buckets(sizes, limit):
        assert sum(sizes[index][1] for index in bucket[:-1]) < max(limit, 1)


@given(SIZES, LIMITS)
def test_the_first_bucket_leaves_early(sizes: list[tuple[str, int]], limit: int) -> None:
    buckets = assign_buckets(sizes, limit)
    if buckets:
        assert sum(sizes[index][1] for index in buckets[0][:-1]) < SMALLEST_BUCKET_BYTES


@given(st.lists(st.integers(1, 2 * MB), min_size=1, max_size=200), st.integers(4 * MB, 64 * MB))
def test_little_is_left_for_the_last_bucket(sizes: list[int], limit: int) -> None:
    # Nothing hides its exchange. It stays open below the smallest size, or is closed by the item that reaches it.
    last = assign_buckets([("f32", size) for size in sizes], limit)[-1]
    assert sum(sizes[index] for index in last[:-1]) < SMALLEST_BUCKET_BYTES


@given(st.lists(st.integers(1, 2 * MB), min_size=1, max_size=200), st.integers(4 * MB, 64 * MB))
def test_only_the_last_bucket_may_be_tiny(sizes: list[int], limit: int) -> None:
    for bucket in assign_buckets([("f32", size) for size in sizes], limit)[:-1]:
        assert sum(sizes[index] for index in bucket) >= SMALLEST_BUCKET_BYTES


def test_a_long_model_is_cut_small_large_and_smaller_again() -> None:
    lengths = [len(bucket) for bucket in assign_buckets([("f32", MB)] * 100, 25 * MB)]
    assert lengths[:3] == [1, 25, 25]
    assert lengths[2:] == sorted(lengths[2:], reverse=True)
    assert lengths[-1] == 1
    for number in range(3, len(lengths) - 1):
        to_come = sum(lengths[number + 1 :])
        assert lengths[number] <= max(to_come // 2, 1) + 1


def test_a_limit_of_nothing_gives_every_item_a_bucket() -> None:
    assert assign_buckets([("f32", 10)] * 3, 0) == [[0], [1], [2]]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def test_gradients_are_packed_in_order_and_missing_ones_are_zero() -> None:
    one, two, three = parameter(2, 2), parameter(3), parameter(1)
    one.grad, three.grad = torch.arange(4.0).view(2, 2), torch.tensor([9.0])
    bucket = Bucket([one, two, three], keep_views=False)
    assert bucket.pack().tolist() == [0, 1, 2, 3, 0, 0, 0, 9]
    two.grad = torch.ones(3)
    assert bucket.pack().tolist() == [0, 1, 2, 3, 1, 1, 1, 9]


@pytest.mark.parametrize("keep_views", [False, True])
def test_averages_come_back_to_the_parameters_that_somebody_used(keep_views: bool) -> None:
    one, two, three = parameter(2), parameter(2), parameter(2)
    one.grad = torch.tensor([2.0, 4.0])
    before = one.grad
    bucket = Bucket([one, two, three], keep_views)
    flat = bucket.pack()
    flat.copy_(torch.arange(6.0))
    bucket.unpack([True, True, False])
    assert one.grad is not None
    assert two.grad is not None
    assert one.grad.tolist() == [0, 1]
    assert two.grad.tolist() == [2, 3]
    assert three.grad is None
    is_view = one.grad.data_ptr() == flat.data_ptr()
    assert is_view == keep_views
    assert (one.grad is before) != keep_views
    flat.zero_()
    assert (one.grad.tolist() == [0, 0]) == keep_views


def test_views_are_not_copied_onto_themselves_but_new_gradients_are() -> None:
    one, two = parameter(2), parameter(2)
    one.grad, two.grad = torch.ones(2), torch.ones(2)
    bucket = Bucket([one, two], keep_views=True)
    flat = bucket.pack()
    bucket.unpack([True, True])
    one.grad.add_(5)
    two.grad = torch.full((2,), 3.0)
    assert bucket.pack() is flat
    assert flat.tolist() == [6, 6, 3, 3]


def test_a_lone_gradient_travels_where_it_lies() -> None:
    one = parameter(2, 3)
    one.grad = torch.ones(2, 3)
    bucket = Bucket([one], keep_views=False)
    flat = bucket.pack()
    flat.mul_(7)
    bucket.unpack([True])
    assert flat.data_ptr() == one.grad.data_ptr()
    assert one.grad.tolist() == [[7.0] * 3] * 2


def test_a_lone_gradient_that_is_missing_or_in_another_order_is_copied() -> None:
    one = parameter(2, 3)
    bucket = Bucket([one], keep_views=False)
    assert bucket.pack().tolist() == [0] * 6
    one.grad = torch.arange(6.0).view(3, 2).t()
    flat = bucket.pack()
    assert flat.view(2, 3).tolist() == one.grad.tolist()
    flat.mul_(2)
    bucket.unpack([True])
    assert one.grad.tolist() == [[0, 4, 8], [2, 6, 10]]


LAYOUTS = [
    torch.zeros(2, 3, 4, 5),
    torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.zeros(4, 6).t(),
    torch.zeros(4, 6)[:, ::2],
    torch.zeros(1, 7, 1, 1).to(memory_format=torch.channels_last),
    torch.zeros(3).expand(2, 3),
    torch.zeros(()),
    torch.zeros(0, 3),
]


@settings(max_examples=25)
@given(st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=4), st.booleans(), st.integers(0, 99))
def test_any_layout_survives_the_journey(layouts: list[torch.Tensor], keep_views: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(layout) for layout in layouts]
    wanted = [torch.randn(p.shape, generator=generator) for p in parameters]
    for p, gradient in zip(parameters, wanted, strict=True):
        p.grad = gradient.clone()
    bucket = Bucket(parameters, keep_views)
    flat = bucket.pack()
    assert flat.numel() == sum(p.numel() for p in parameters)
    flat.mul_(2)
    for p in parameters:
        p.grad = None
    bucket.unpack([True] * len(parameters))
    for p, gradient in zip(parameters, wanted, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, 2 * gradient)


def test_gradients_keep_the_memory_order_of_their_parameters() -> None:
    weight = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    bucket = Bucket([weight, parameter(2)], keep_views=False)
    bucket.pack()
    bucket.unpack([True, True])
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()


def test_what_the_user_asked_for_limits_every_bucket() -> None:
    assert limit_collective(3 * MB, defers=True) == limit_collective(3 * MB, defers=False) == 3 * MB
    assert limit_served(3 * MB, owners=8, chunk_bytes=4 * MB) == 3 * MB


def test_buckets_are_smaller_where_a_layer_waits_for_nothing_but_its_own() -> None:
    assert limit_collective(None, defers=True) < limit_collective(None, defers=False)


@given(st.integers(2, 1024), st.floats(1e6, 1e11))
def test_a_served_bucket_has_two_whole_chunks_for_every_owner_as_long_as_that_is_not_too_much(
    owners: int, bytes_per_s: float
) -> None:
    chunk_bytes = chunk_bytes_for(bytes_per_s)
    limit = limit_served(None, owners, chunk_bytes)
    assert 4 * MB <= limit <= 25 * MB
    assert limit >= 2 * owners * chunk_bytes or limit == 25 * MB


@given(st.floats(1e6, 1e11), st.booleans())
def test_a_chunk_takes_about_as_long_as_it_should_unless_that_is_too_small_or_too_large(
    bytes_per_s: float, lands_whole: bool
) -> None:
    size = chunk_bytes_for(bytes_per_s, lands_whole)
    assert size.bit_count() == 1
    assert SMALLEST_CHUNK_BYTES <= size <= LARGEST_CHUNK_BYTES
    if SMALLEST_CHUNK_BYTES < size < LARGEST_CHUNK_BYTES:
        assert 0.7 < size / bytes_per_s / (WHOLE_CHUNK_S if lands_whole else CHUNK_S) < 1.42
