"""Whose turn it is: what servers of chunks have in common, whoever adds them up. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from poseidon.errors import ServerError


def check_clock(what: object, rank: int, clock: int, current: int, is_open: bool) -> None:
    """Raise unless ``clock`` is the ``current`` one, if its sum is under way, or a later one, if that is finished."""
    if is_open and clock != current:
        raise ServerError(f"rank {rank} sent {what} of clock {clock} while clock {current} is being summed")
    if not is_open and clock <= current:
        raise ServerError(f"rank {rank} sent {what} of clock {clock}, but clock {current} is finished already")


def refuse_second(what: object, rank: int, clock: int) -> ServerError:
    """Return what to say of a contribution that came before."""
    return ServerError(f"rank {rank} sent {what} of clock {clock} twice")


def in_turn(workers: Iterable[int], rank: int, size: int) -> list[int]:
    """Return the workers in the order in which the server on ``rank`` answers them.

    Each begins with another one: all beginning with the first would fill its link and idle the rest.
    """
    return sorted(workers, key=lambda worker: (worker - rank) % size)
