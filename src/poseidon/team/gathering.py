"""A few integers from every worker to every worker: roll calls, flags, and whatever else all must agree on.

They travel over a mesh of their own (``wire/mesh.py``), which costs a fraction of a collective; over gloo where the
mesh could not be connected, or is too narrow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from poseidon.errors import PoseidonError, WireError
from poseidon.job.settings import SECRET
from poseidon.wire.address import default_place, listening_ip
from poseidon.wire.handshake import Credentials
from poseidon.wire.mesh import MOST_WORDS, Mesh, MeshError
from poseidon.wire.settings import WireSettings

if TYPE_CHECKING:
    from poseidon.team.team import Team

_CONNECT_S = 10.0


class PendingGather:
    """Integers on their way from every worker to every worker."""

    def __init__(self, team: Team, values: Sequence[int]) -> None:
        self._team = team
        self._values = list(values)
        self._number = -1
        self._work: Any = None
        # All workers have equally many values, so all choose alike.
        if team.mesh is not None and len(self._values) <= MOST_WORDS:
            self._number = team.mesh.send(self._values)
            return
        mine = torch.tensor(self._values, dtype=torch.int64, device="cpu")
        self._everybody = [torch.empty_like(mine) for _ in range(team.size)]
        self._work = dist.all_gather(self._everybody, mine, group=team.control, async_op=True)

    def __call__(self, what: str) -> list[list[int]]:
        """Wait for and return the integers, by rank."""
        team = self._team
        if self._work is not None:
            team.wait(self._work, what)
            return [row.tolist() for row in self._everybody]
        assert team.mesh is not None
        try:
            return team.mesh.receive(self._number, self._values, team.timeout_s)
        except MeshError as error:
            raise team.watch.lost(what, error.rank, error) from error


def open_mesh(rank: int, size: int) -> Mesh | None:
    """Return a mesh that listens for the other workers; None if this one has no address for them."""
    with contextlib.suppress(OSError, PoseidonError):
        settings = WireSettings.from_environment(os.environ, **default_place())
        return Mesh(rank, size, listening_ip(settings))
    return None


def connect_mesh(mesh: Mesh, addresses: Sequence[Sequence[Any]], drawn: str, timeout_s: float) -> bool:
    """Connect to the others, given their addresses and a secret drawn for this team; return whether that succeeded."""
    encrypt = WireSettings.from_environment().encrypt
    credentials = Credentials((SECRET.read() + drawn).encode(), encrypt)
    try:
        mesh.connect([(ip, port) for ip, port in addresses], credentials, min(timeout_s, _CONNECT_S))
    except WireError:
        mesh.close()
        return False
    return True
