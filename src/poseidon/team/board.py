"""Memory that the workers of a machine share: each writes to its own strip and reads everybody's.

A worker writes, posts, and reads the others' strips once they have posted too. What a post says travels over a mesh
(``wire/mesh.py``), so a wait sleeps in the kernel instead of spinning (there may be fewer cores than workers), ends at
once when a worker's process does, and orders memory on every processor.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.errors import WireError
from poseidon.job import settings
from poseidon.job.limits import reach_limit
from poseidon.team.team import Team
from poseidon.wire.handshake import Credentials
from poseidon.wire.mesh import Mesh, MeshError
from poseidon.wire.secret import JobSecret
from poseidon.wire.shared import SharedBlock

ALIGNMENT = 64
"""Values on a board begin at multiples of this, a line of the processor's cache."""


class Board:
    """The strips of the workers of one machine, as one of them sees them. Any thread may post and wait.

    Workers must post equally often; the posts with one number belong together. Whoever has seen all posts with a number
    may read what was written before them. Nothing here keeps a worker from writing to what others still read:
    :class:`Rounds` does, and whoever else uses a board must.
    """

    def __init__(self, team: Team, members: Sequence[int], mesh: Mesh, block: SharedBlock, strip_bytes: int) -> None:
        self.members = tuple(members)
        """Ranks in the team of the workers of this machine."""
        self.place = self.members.index(team.rank)
        """Position of this worker among them."""
        self.strip_bytes = strip_bytes
        self._team = team
        self._mesh = mesh
        whole = torch.frombuffer(block.data, dtype=torch.uint8)
        self._strips = whole.view(len(members), strip_bytes)
        self._views: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}
        """Kept: to make them takes as long as to add up a small bucket."""

    def parts(self, start: int, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return ``count`` values that lie ``start`` bytes into each member's strip, a multiple of 64."""
        key = (start, count, dtype)
        found = self._views.get(key)
        if found is None:
            stop = start + count * dtype.itemsize
            found = self._views[key] = tuple(strip[start:stop].view(dtype) for strip in self._strips)
        return found

    def post(self) -> int:
        """Tell the others that something is written; return the post's number."""
        return self._mesh.send(b"")

    def wait(self, number: int, what: str) -> None:
        """Wait for all posts with this number; raises ``WorkerLostError`` if one does not come in time."""
        clock = self._team.watch.clock
        began = 0.0 if clock is None else clock.begin_wait(what)
        try:
            self._mesh.receive(number, b"", math.inf, lambda: self._team.watch.waiting(what, members=self.members))
        except MeshError as error:
            raise self._team.watch.lost(what, self.members[error.rank], error) from error
        finally:
            if clock is not None:
                clock.end_wait(what, began)

    def close(self) -> None:
        """Close the connections. The memory is freed when nobody uses it any more."""
        self._mesh.close()


class Rounds:
    """A board used round after round: write, meet, read.

    There are two halves, used in turn: a worker that writes in a round has met the others in the last one, so they have
    read what was written in the one before that.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._half = 0

    @property
    def room_bytes(self) -> int:
        """Bytes that a worker can write in a round."""
        return self._board.strip_bytes // 2 // ALIGNMENT * ALIGNMENT

    def mine(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return where this worker writes in this round."""
        return self._parts(count, dtype)[self._board.place]

    def meet(self, count: int, dtype: torch.dtype, what: str) -> tuple[Tensor, ...]:
        """Wait until all have written; return what they wrote, to be read before the next :meth:`meet`."""
        self._board.wait(self._board.post(), what)
        parts = self._parts(count, dtype)
        self._half ^= 1
        return parts

    def _parts(self, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._board.parts(self._half * self.room_bytes, count, dtype)


def open_board(team: Team, strip_bytes: int) -> Board | None:
    """Return the board of this worker's machine; None if the workers of some machine cannot share memory.

    Collective in the team.
    """
    is_wanted = all(row[0] for row in team.gather_ints([settings.SHARED_MEMORY.read()], "the use of shared memory"))
    if not is_wanted:
        return None
    members = team.topology.neighbours(team.rank)
    try:
        block = _share_block(team, members, strip_bytes)
        mesh = None if block is None else _connect(team, members)
    except _CannotShareError as error:
        warnings.warn(
            f"rank {team.rank}: the workers of this machine exchange gradients over sockets instead of shared memory: "
            f"{error}; {settings.SHARED_MEMORY.name}=0 accepts that",
            stacklevel=2,
        )
        return None
    return None if block is None or mesh is None else Board(team, members, mesh, block, strip_bytes)


class _CannotShareError(Exception):
    """Why this worker cannot share memory; all workers know by now that one cannot."""


def _share_block(team: Team, members: Sequence[int], strip_bytes: int) -> SharedBlock | None:
    """Return memory that the machine's first worker creates; None if another worker has none. Collective."""
    is_first, block, why = team.rank == members[0], None, ""
    try:
        block = SharedBlock.create(strip_bytes * len(members)) if is_first else None
    except WireError as error:
        why = str(error)
    created = team.gather_json(None if block is None else block.handle)[members[0]]
    if created is not None and not is_first:
        try:
            block = SharedBlock.open(created)
        except WireError as error:
            why = str(error)
    all_have = _agree(team, block is not None)
    if is_first and block is not None:
        block.unlist()
    if why:
        raise _CannotShareError(why)
    return block if all_have else None


def _connect(team: Team, members: Sequence[int]) -> Mesh | None:
    """Return a mesh between the workers of each machine; None if some machine has none. Collective."""
    mesh = Mesh(members.index(team.rank), len(members), team.mesh.address[0], team.mesh.lost_after_s)
    everybody = team.gather_json({"address": mesh.address, "nonce": secrets.token_hex(16)})
    addresses = [(str(ip), int(port)) for ip, port in (everybody[rank]["address"] for rank in members)]
    secret = JobSecret(team.secret).derive("board", everybody[members[0]]["nonce"])
    try:
        mesh.connect(addresses, Credentials(secret, team.encrypts), reach_limit(team.timeout_s))
        is_connected = True
    except WireError:
        is_connected = False
    if _agree(team, is_connected):
        return mesh
    mesh.close()
    if not is_connected and team.rank == members[0]:
        raise _CannotShareError("the workers cannot connect to each other")
    return None


def _agree(team: Team, can: bool) -> bool:
    return all(row[0] for row in team.gather_ints([can], "the sharing of memory"))
