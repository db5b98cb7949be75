"""Which workers share a machine, and who relays whose messages. Pure.

Bytes between machines are expensive. A broadcast therefore crosses to each other machine once, to the worker there with
the sender's local rank, which relays it to its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """Workers of each machine, as ranks in ascending order; machines in the order of their first worker."""

    machines: tuple[tuple[int, ...], ...]

    @classmethod
    def from_names(cls, machine_of_rank: Sequence[str]) -> Topology:
        """Group ranks by the name of their machine."""
        groups: dict[str, list[int]] = {}
        for rank, name in enumerate(machine_of_rank):
            groups.setdefault(name, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in groups.values()))

    @cached_property
    def _place(self) -> dict[int, tuple[int, int]]:
        return {rank: (m, place) for m, ranks in enumerate(self.machines) for place, rank in enumerate(ranks)}

    @property
    def workers(self) -> int:
        """Number of workers."""
        return sum(len(ranks) for ranks in self.machines)

    @property
    def is_even(self) -> bool:
        """Whether every machine has the same number of workers."""
        return len({len(ranks) for ranks in self.machines}) == 1

    @property
    def has_levels(self) -> bool:
        """Whether combining inside a machine first saves traffic between machines."""
        return len(self.machines) > 1 and self.workers > len(self.machines)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return all workers on ``rank``'s machine, itself included."""
        return self.machines[self._place[rank][0]]

    def counterparts(self, rank: int) -> tuple[int, ...]:
        """Return the workers with ``rank``'s local rank on every machine, itself included; machines must be even."""
        return tuple(ranks[self._place[rank][1]] for ranks in self.machines)

    def sender(self, origin: int, receiver: int) -> int:
        """Return the worker from which ``receiver`` gets a broadcast of ``origin``."""
        machine, place = self._place[receiver]
        origin_machine, origin_place = self._place[origin]
        if machine == origin_machine:
            return origin
        relay_place = origin_place % len(self.machines[machine])
        return origin if place == relay_place else self.machines[machine][relay_place]

    def receivers(self, origin: int, sender: int) -> tuple[int, ...]:
        """Return the workers to which ``sender`` passes a broadcast of ``origin`` (``sender`` may be ``origin``)."""
        return tuple(
            rank
            for ranks in self.machines
            for rank in ranks
            if rank not in (origin, sender) and self.sender(origin, rank) == sender
        )
