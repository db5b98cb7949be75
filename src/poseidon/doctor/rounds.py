"""Rounds in which all pairs of hosts measure their links, each host in one pair at a time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def pair_rounds(hosts: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Return rounds of disjoint pairs in which every pair occurs once, as in a round-robin tournament.

    The first host stays in place while the others rotate by one each round; with an odd number one pauses.
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
