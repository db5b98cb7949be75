"""Which hosts measure their link when: everybody with everybody, nobody in two pairs at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def pair_rounds(hosts: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Return rounds of disjoint pairs such that every pair meets once, as in a tournament.

    The first host keeps its seat while the others move on by one each round; with an odd number one rests.
    """
    seats: list[T | None] = [*hosts]
    if len(seats) % 2:
        seats.append(None)
    rounds = []
    for _ in range(len(seats) - 1):
        opposite = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append([(one, other) for one, other in opposite if one is not None and other is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
