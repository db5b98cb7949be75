"""Who is in a team. Topology, size and ranks are made from this value, and made anew for a new epoch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from poseidon.errors import PoseidonError
from poseidon.team.topology import Topology


@dataclass(frozen=True)
class Member:
    """One worker of a team."""

    global_rank: int
    """Its rank in the whole job."""
    host: str
    """The host's name, for messages."""
    machine: str
    """Equal for workers that share a machine, and so a network card."""


@dataclass(frozen=True)
class Membership:
    """The workers of a team during one epoch; a worker's rank in the team is its position in ``members``."""

    epoch: int
    """Counts the changes of membership; a team starts with 0."""
    members: tuple[Member, ...]

    @classmethod
    def unnamed(cls, global_ranks: Sequence[int]) -> Membership:
        """Return the workers of a new team before they have introduced themselves."""
        return cls(0, tuple(Member(each, f"host of rank {rank}", "") for rank, each in enumerate(global_ranks)))

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.members)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Host names by rank."""
        return tuple(member.host for member in self.members)

    @cached_property
    def topology(self) -> Topology:
        """Which workers share a machine."""
        return Topology.from_names([member.machine for member in self.members])

    @cached_property
    def _rank_of(self) -> dict[int, int]:
        return {member.global_rank: rank for rank, member in enumerate(self.members)}

    def rank_of(self, global_rank: int) -> int:
        """Return the rank in the team of a worker of the job."""
        return self._rank_of[global_rank]

    def find(self, global_rank: int) -> int | None:
        """Return the same, None if the worker is not in the team."""
        return self._rank_of.get(global_rank)

    def includes(self, other: Membership) -> bool:
        """Return whether all workers of another team are in this one."""
        return all(member.global_rank in self._rank_of for member in other.members)


class PeerLostError(PoseidonError):
    """A worker's connection ended; whoever waits for a future gets it as ``WorkerLostError``."""

    is_broken = True

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank
