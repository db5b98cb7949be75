"""How the workers of a new epoch come to have the same state: whoever has the newest sends it to those who have not.

All who have it send at once, each its part of the pieces. To a worker that has copied an earlier state of theirs
(``ahead.py``) they send only what has changed since.
"""

from __future__ import annotations

import itertools
import struct
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from poseidon import files
from poseidon.checkpoints.ahead import Ahead, Lent, dealt
from poseidon.checkpoints.changes import apply_change, encode_change
from poseidon.checkpoints.folder import pieces_of, read
from poseidon.checkpoints.layout import (
    PIECE_BYTES,
    Description,
    StatePiece,
    cut,
    describe_tensors,
    flatten,
    lift,
    lower,
    make_room,
    shape_rows,
    view_of,
)
from poseidon.checkpoints.memory import Kept
from poseidon.checkpoints.replicas import Staged, find_sources
from poseidon.checkpoints.shards import Dealt, ShardCopy
from poseidon.checkpoints.states import as_bytes
from poseidon.errors import ConfigError, MismatchError
from poseidon.team.mail import Tag
from poseidon.team.team import Team

_HEAD = struct.Struct("<QIB")
"""Size of what follows, checksum of what it makes, and how it is written."""
_PLAIN, _CHANGE, _SAME = 0, 1, 2
_UNDER_WAY = 8
"""Messages that one worker has prepared and that have not left."""
WHAT = "the state of the last complete step"


@dataclass(frozen=True)
class Stock:
    """What a worker has when a new epoch begins."""

    step: int
    """Of the state in its memory; -1: none."""
    token: str = ""
    """Of what it has copied ahead."""
    places: int = 0
    complete: tuple[int, ...] = ()
    lent: Mapping[str, int] = field(default_factory=dict)
    """What it has lent: its place, by the borrower's token."""
    shards: tuple[tuple[int, int, int, int], ...] = ()
    """Of states that are spread over workers: step, model, number and epoch..."""
    dealt: tuple[tuple[int, int, int], ...] = ()
    """... and for each such model, after the step in its memory: the epoch, and how many shards there are."""

    @classmethod
    def of(cls, kept: Kept | None, ahead: Ahead | None, lent: Mapping[str, Lent], staged: Staged | None) -> Stock:
        """Return what a worker has."""
        places = {token: each.place for token, each in lent.items()}
        generations = [] if kept is None else [(kept.step, kept.shards)]
        generations += [] if staged is None else [(staged.step, staged.shards)]
        shards = tuple((step, each.member, each.number, each.epoch) for step, some in generations for each in some)
        dealt = () if kept is None else tuple((member, *each) for member, each in kept.dealt.items())
        mine = cls(-1 if kept is None else kept.step, lent=places, shards=shards, dealt=dealt)
        if ahead is None:
            return mine
        return replace(mine, token=ahead.token, places=ahead.places, complete=tuple(sorted(ahead.complete)))

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Stock:
        """Return what another worker has told with :meth:`facts`."""
        rows = {name: tuple(tuple(each) for each in facts[name]) for name in ("shards", "dealt")}
        return cls(**{**facts, **rows, "complete": tuple(facts["complete"])})

    def facts(self) -> dict[str, Any]:
        """Return this as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Agreement:
    """From which step the workers of a new epoch go on, and who has what of it."""

    newest: int
    """The step; -1: nobody has begun."""
    dealt: Mapping[int, Dealt] = field(default_factory=dict)
    """How the state of each model is spread, if it is."""
    sources: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Who sends each shard (model, number)..."""
    lost: Sequence[tuple[int, int]] = ()
    """... and those that nobody has."""

    def shards_of(self, kept: Kept | None, staged: Staged | None) -> list[ShardCopy]:
        """Return what one worker has of the step."""
        if staged is not None and staged.step == self.newest:
            return staged.shards
        return [] if kept is None or kept.step != self.newest else kept.shards


def agree(stocks: Sequence[Stock]) -> Agreement:
    """Return what follows from what all workers have, the same on all of them. Pure.

    Whoever keeps a step knows that all workers have had their shards and replicas of it. So the newest step that
    anybody keeps is the last complete one; others may have its shards only, and get the rest.
    """
    newest = max(each.step for each in stocks)
    if newest < 0:
        return Agreement(newest)
    dealt = {member: Dealt(*each) for member, *each in next(one.dealt for one in stocks if one.step == newest)}
    holdings = [[each[1:] for each in stock.shards if each[0] == newest] for stock in stocks]
    return Agreement(newest, dealt, *find_sources(dealt, holdings))


@dataclass(frozen=True)
class HandedOver:
    """How a worker got its state."""

    ahead_bytes: int
    """While the others trained."""
    ahead_s: float
    bytes: int
    """While they waited."""
    took_s: float


@dataclass(frozen=True)
class Consignment:
    """One worker sends one part of the state to another."""

    sender: int
    receiver: int
    place: int
    places: int
    is_change: bool
    """The receiver has an earlier state of this part, and the sender knows which."""


def plan_consignments(stocks: Sequence[Stock], is_alike: bool = True) -> list[Consignment]:
    """Return who sends what to whom, the same on all workers. Pure.

    Unless workers hold the same (``is_alike``), one of them sends everything.
    """
    newest = max(each.step for each in stocks)
    holders = [rank for rank, each in enumerate(stocks) if each.step == newest]
    if not is_alike:
        del holders[1:]
    found = []
    for receiver, each in enumerate(stocks):
        if each.step == newest:
            continue
        known = {stocks[rank].lent[each.token]: rank for rank in holders if each.token in stocks[rank].lent}
        places = each.places if any(place in known for place in each.complete) else len(holders)
        for place in range(places):
            is_change = places == each.places and place in each.complete and place in known
            # Not all begin with the same one.
            sender = known[place] if is_change else holders[(place + receiver) % len(holders)]
            found.append(Consignment(sender, receiver, place, places, is_change))
    return found


def hand_over(
    team: Team,
    stocks: Sequence[Stock],
    kept: Kept | None,
    ahead: Ahead | None,
    lent: Mapping[str, Lent],
    is_alike: bool = True,
) -> tuple[Kept, HandedOver | None]:
    """Return the newest state that any worker has; of one that others sent, also how it came. Collective.

    ``is_alike``: all that have completed the newest step hold the same.
    """
    began = time.monotonic()
    newest = max(each.step for each in stocks)
    source = next(rank for rank, each in enumerate(stocks) if each.step == newest)
    consignments = plan_consignments(stocks, is_alike)
    if kept is not None and kept.step == newest:
        rest, tensors = lift(kept.parts)
        description = describe_tensors(tensors)
        state = {"step": newest, "parts": rest, "values": kept.values, "description": description}
        hand_out(team, as_bytes(state) if team.rank == source else b"", "", source)
        by_rank = {rank: lent[each.token] for rank, each in enumerate(stocks) if each.token in lent}
        send_state(team, consignments, tensors, description, by_rank)
        return kept, None
    received = read(hand_out(team, b"", "", source), f"the state of step {newest} of rank {source}")
    described: Description = received["description"]
    rows, came = receive_state(team, consignments, described, ahead)
    parts = lower(received["parts"], shape_rows(rows, described))
    took_s = time.monotonic() - began
    facts = HandedOver(0 if ahead is None else ahead.size, 0.0 if ahead is None else ahead.took_s, came, took_s)
    return Kept(newest, parts, {} if kept is None else kept.own, received["values"]), facts


def hand_out(team: Team | None, content: bytes, problem: str, source: int) -> bytes | memoryview:
    """Return the bytes that ``source`` has, or raise its problem. Collective."""
    if team is None:
        if problem:
            raise ConfigError(problem)
        return content
    told = team.gather_json({"size": len(content), "problem": problem})[source]
    if told["problem"]:
        raise ConfigError(f"rank {source}: {told['problem']}")
    if told["size"] > files.memory_bytes():
        raise ConfigError(f"the checkpoint of rank {source} has {told['size']} bytes, more than this machine has")
    held = memoryview(content if team.rank == source else bytearray(told["size"]))
    # All at once: while one is passed on, the next comes.
    pieces = [team.start_broadcast(held[piece], source) for piece in pieces_of(len(held), PIECE_BYTES)]
    for future in itertools.chain.from_iterable(pieces):
        team.result(future, "a checkpoint")
    return held


def send_state(
    team: Team,
    consignments: Sequence[Consignment],
    tensors: Sequence[Tensor],
    description: Description,
    lent: Mapping[int, Lent],
) -> None:
    """Send this worker's part of a state; ``lent`` is what it has lent, by receiver."""
    channel, rows, pieces = team.mail.new_channel(), flatten(tensors), cut(description)
    under_way: deque[Future[None]] = deque()
    for consignment, piece in _order(consignments, pieces, team.rank):
        old = lent.get(consignment.receiver) if consignment.is_change else None
        new = view_of(rows, piece)
        kind, data = _PLAIN, new
        if old is not None and old.description == description:
            change = encode_change(view_of(old.rows, piece), new)
            if change is not None:
                kind, data = (_CHANGE if change else _SAME), memoryview(change)
        head = _HEAD.pack(data.nbytes, 0 if kind == _SAME else zlib.crc32(new), kind)
        under_way.append(team.mail.send(consignment.receiver, Tag(channel, 2 * piece.number), memoryview(head)))
        if kind != _SAME:
            under_way.append(team.mail.send(consignment.receiver, Tag(channel, 2 * piece.number + 1), data))
        while len(under_way) > _UNDER_WAY:
            team.result(under_way.popleft(), WHAT)
    for future in under_way:
        team.result(future, WHAT)


def receive_state(
    team: Team, consignments: Sequence[Consignment], description: Description, ahead: Ahead | None
) -> tuple[list[Tensor], int]:
    """Return the rows of bytes of a state that others send, and how many bytes came."""
    channel, pieces = team.mail.new_channel(), cut(description)
    is_known = ahead is not None and ahead.description == description
    rows = ahead.rows if ahead is not None and is_known else make_room(description)
    mine = [each for each in consignments if each.receiver == team.rank]
    coming = []
    for consignment, piece in _interleave([(each, dealt(pieces, each.place, each.places)) for each in mine]):
        room = bytearray(_HEAD.size)
        future = team.mail.expect(consignment.sender, Tag(channel, 2 * piece.number), memoryview(room))
        coming.append((consignment, piece, room, future))
    came = 0
    for consignment, piece, room, future in coming:
        team.result(future, WHAT)
        size, check, kind = _HEAD.unpack(room)
        if kind == _SAME:
            continue
        place, tag = view_of(rows, piece), Tag(channel, 2 * piece.number + 1)
        if kind == _PLAIN:
            team.result(team.mail.expect(consignment.sender, tag, place), WHAT)
        else:
            change = bytearray(size)
            team.result(team.mail.expect(consignment.sender, tag, memoryview(change)), WHAT)
            apply_change(place, change)
        if zlib.crc32(place) != check:
            raise MismatchError(f"a piece of {WHAT} from rank {consignment.sender} is not what it should be")
        came += size
    return rows, came


def _order(
    consignments: Sequence[Consignment], pieces: Sequence[StatePiece], sender: int
) -> list[tuple[Consignment, StatePiece]]:
    """Return what one worker sends, in the order in which it does."""
    mine = [each for each in consignments if each.sender == sender]
    return _interleave([(each, dealt(pieces, each.place, each.places)) for each in mine])


def _interleave(parts: Sequence[tuple[Consignment, Sequence[StatePiece]]]) -> list[tuple[Consignment, StatePiece]]:
    """Return the pieces of several consignments, a piece of each at a time."""
    longest = max((len(pieces) for _, pieces in parts), default=0)
    return [
        (consignment, pieces[turn]) for turn in range(longest) for consignment, pieces in parts if turn < len(pieces)
    ]
