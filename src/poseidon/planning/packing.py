"""Which gradients share one collective. Pure: the engine and the simulator both use it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

SMALLEST_BUCKET_BYTES = 2**20
"""Below this, a collective costs latency rather than bandwidth."""
LARGEST_BUCKET_BYTES = 25 * 2**20
"""The default of torch's DistributedDataParallel."""
_DEFERRED_BYTES = 8 * 2**20
"""Where a layer's next forward waits for its whole bucket, and for nothing else."""
_SERVED_BYTES = 4 * 2**20
"""Messages need no common order, so latencies overlap and buckets may be small."""


def limit_collective(asked_bytes: int | None, defers: bool) -> int:
    """Return the most bytes that share a collective; ``defers``: the next forward need not wait for all of them."""
    if asked_bytes is not None:
        return asked_bytes
    return _DEFERRED_BYTES if defers else LARGEST_BUCKET_BYTES


def limit_served(asked_bytes: int | None, owners: int, chunk_bytes: int) -> int:
    """Return the most bytes that go through the parameter server together.

    A bucket is spread over all owners. With less than a whole chunk per owner, the same bytes need more messages, and
    on fast links messages dominate the cost; with two chunks per owner, the sums of one travel while the parts of the
    next arrive.
    """
    most = LARGEST_BUCKET_BYTES if asked_bytes is None else asked_bytes
    return min(most, max(_SERVED_BYTES, 2 * owners * chunk_bytes))


def assign_buckets(sizes: Sequence[tuple[Hashable, int]], limit_bytes: int) -> list[list[int]]:
    """Put items, given as (kind, bytes) in the order they become ready, into buckets of one kind each.

    A bucket is closed once it holds its limit, so it may exceed it by its last item. The first limit is small, so
    that the wire has something to do early in backward. The later ones shrink to half of what is still to come:
    nothing hides the exchange of the last bucket, so it must not have gathered a long tail of layers. Buckets come
    in the order in which their last items are ready. Pure.
    """
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    closed: list[list[int]] = []
    to_come = sum(size for _, size in sizes)
    for index, (kind, size) in enumerate(sizes):
        members, total = open_buckets.pop(kind, ([], 0))
        members.append(index)
        total += size
        to_come -= size
        wanted = max(min(limit_bytes, to_come // 2), SMALLEST_BUCKET_BYTES) if closed else SMALLEST_BUCKET_BYTES
        if total >= min(wanted, limit_bytes):
            closed.append(members)
        else:
            open_buckets[kind] = (members, total)
    closed.extend(members for members, _ in open_buckets.values())
    return sorted(closed, key=lambda members: members[-1])


def even_buckets(sizes: Sequence[tuple[Hashable, int]], limit_bytes: int) -> list[list[int]]:
    """Pack like torch's DistributedDataParallel: a small first bucket, then full ones, each of one kind."""
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    closed: list[list[int]] = []
    for index, (kind, size) in enumerate(sizes):
        members, total = open_buckets.pop(kind, ([], 0))
        members.append(index)
        total += size
        if total >= (limit_bytes if closed else min(SMALLEST_BUCKET_BYTES, limit_bytes)):
            closed.append(members)
        else:
            open_buckets[kind] = (members, total)
    closed.extend(members for members, _ in open_buckets.values())
    return sorted(closed, key=lambda members: members[-1])
