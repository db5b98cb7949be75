"""Slots are cut into chunks, and every chunk gets an owner. Pure.

All workers call :func:`cut` with the same arguments and get the same answer, so none of it travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of a slot's elements that is sent and summed as one."""

    slot: int
    index: int
    """Position among the slot's chunks."""
    start: int
    stop: int
    """One past the last element."""
    owner: int
    """Rank that sums it."""

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"chunk {self.index} of slot {self.slot}"


def cut(
    sizes: Sequence[int], owners: Sequence[int], chunk_elements: int, least_elements: int | None = None
) -> list[tuple[Chunk, ...]]:
    """Return the chunks of slots 0, 1, ..., given their sizes in elements and the ranks that own chunks.

    Whatever the sizes, the owners' loads (in elements, over any leading run of slots) differ by at most the largest
    chunk. No chunk has more than ``chunk_elements``. A slot with fewer chunks than owners is cut smaller, down to
    ``least_elements`` each (by default a quarter of ``chunk_elements``); any larger one gives every owner the same
    number of chunks. Either way the exchange of one slot alone uses all links equally.
    """
    least = max(1, chunk_elements // 4) if least_elements is None else least_elements
    _check(sizes, owners, chunk_elements, least)
    loads = dict.fromkeys(owners, 0)
    return [_cut_slot(slot, size, loads, chunk_elements, least) for slot, size in enumerate(sizes)]


def _cut_slot(slot: int, size: int, loads: dict[int, int], largest: int, least: int) -> tuple[Chunk, ...]:
    """Cut one slot and add its chunks to ``loads``.

    Each round hands one piece to each owner, the longest piece to the least loaded. Pieces differ by at most one
    element, so a full round never widens the gap between owners by more than one element, and a partial round lifts
    only the least loaded: so the gap stays within one chunk.
    """
    count = _count_pieces(size, len(loads), largest, least)
    quotient, longer = divmod(size, count) if count else (0, 0)
    chunks: list[Chunk] = []
    start = 0
    while len(chunks) < count:
        by_load = sorted(loads, key=loads.__getitem__)
        for owner in by_load[: count - len(chunks)]:
            stop = start + quotient + (len(chunks) < longer)
            chunks.append(Chunk(slot, len(chunks), start, stop, owner))
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
    negative = [(slot, size) for slot, size in enumerate(sizes) if size < 0]
    if negative:
        raise ConfigError(f"slot {negative[0][0]} has {negative[0][1]} elements; sizes cannot be negative")
