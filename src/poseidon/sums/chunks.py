"""Units are cut into chunks, and every chunk gets a shard that owns it. Pure.

All workers call :func:`cut` with the same arguments and get the same answer, so nothing about it is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of a unit's elements that travels and is summed as one."""

    unit: int
    index: int
    """Position among the unit's chunks."""
    start: int
    stop: int
    """One past the last element."""
    owner: int
    """Rank of the shard that sums it."""

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def cut(
    sizes: Sequence[int], owners: Sequence[int], chunk_elements: int, least_elements: int | None = None
) -> list[tuple[Chunk, ...]]:
    """Return the chunks of each unit, given the units' sizes in elements and the ranks that hold shards.

    Whatever the sizes, the owners' loads (in elements, over any leading run of units) differ by at most the largest
    chunk. No chunk has more than ``chunk_elements``. A unit with fewer chunks than there are owners is cut smaller,
    down to ``least_elements`` each (a quarter of ``chunk_elements`` unless told), and any larger one gives every
    owner the same number of chunks: the exchange of one unit alone then uses all links alike.
    """
    least = max(1, chunk_elements // 4) if least_elements is None else least_elements
    _check(sizes, owners, chunk_elements, least)
    loads = dict.fromkeys(owners, 0)
    return [_cut_unit(unit, size, loads, chunk_elements, least) for unit, size in enumerate(sizes)]


def owned_by(owner: int, units: Sequence[tuple[Chunk, ...]]) -> list[Chunk]:
    """Return the chunks of all ``units`` that belong to ``owner``."""
    return [chunk for chunks in units for chunk in chunks if chunk.owner == owner]


def _cut_unit(unit: int, size: int, loads: dict[int, int], largest: int, least: int) -> tuple[Chunk, ...]:
    """Cut one unit and add its chunks to ``loads``.

    Each round hands one piece to each owner, the longest piece to the least loaded. Pieces differ by one element at
    most, so a full round never widens the gap between owners by more than one element, and a partial round only
    ever lifts the least loaded ones: that is why the gap stays within one chunk.
    """
    count = _count_pieces(size, len(loads), largest, least)
    quotient, longer = divmod(size, count) if count else (0, 0)
    chunks: list[Chunk] = []
    start = 0
    while len(chunks) < count:
        by_load = sorted(loads, key=loads.__getitem__)
        for owner in by_load[: count - len(chunks)]:
            stop = start + quotient + (len(chunks) < longer)
            chunks.append(Chunk(unit, len(chunks), start, stop, owner))
            loads[owner] += stop - start
            start = stop
    return tuple(chunks)


def _count_pieces(size: int, owners: int, largest: int, least: int) -> int:
    count = -(-size // largest)
    if count < owners:
        return max(count, min(owners, size // least))
    return min(size, -(-count // owners) * owners)


def _check(sizes: Sequence[int], owners: Sequence[int], chunk_elements: int, least: int) -> None:
    if not owners or len(set(owners)) != len(owners):
        raise ConfigError(f"owners are {list(owners)}; at least one rank is needed, each once")
    if chunk_elements < 1 or not 1 <= least <= chunk_elements:
        raise ConfigError(
            f"chunk_elements is {chunk_elements} and least_elements {least}; "
            "both must be at least 1 and the second no larger than the first"
        )
    negative = [(unit, size) for unit, size in enumerate(sizes) if size < 0]
    if negative:
        raise ConfigError(f"unit {negative[0][0]} has {negative[0][1]} elements; sizes cannot be negative")
