"""Every shard twice, on two machines, after every step; and what the workers of a new epoch make of them.

``Checkpoint.step`` sends each worker's shard (``shards.py``) to the next machine. The step counts as complete once all
workers have said that theirs has arrived; until then the shards of the step before stay where they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from poseidon.checkpoints.memory import Kept
from poseidon.checkpoints.shards import (
    Dealt,
    Inheritance,
    Manifest,
    RunState,
    ShardCopy,
    Sharded,
    Source,
    exact_bytes,
    exact_runs,
    pack,
    replica_ranks,
)
from poseidon.team.epochs import living_on
from poseidon.team.mail import Tag
from poseidon.team.team import Team

_HEAD = struct.Struct("<QQQ")
"""Bytes of manifest (0: as before), state and exact weights."""
WHAT = "the replicas of the last step"


@dataclass(frozen=True)
class Staged:
    """Shards after a step of which it is not known yet whether it is complete."""

    step: int
    shards: list[ShardCopy]
    dealt: dict[int, Dealt]


@dataclass
class Replicator:
    """Keeps replicas of shards; the memory of the step before the last one is used again."""

    count: int
    """Replicas of each shard."""
    staged: Staged | None = None
    _spare: list[ShardCopy] = field(default_factory=list)
    _sent: dict[int, Manifest] = field(default_factory=dict)
    """The last manifest of each model, which the others have..."""
    _known: dict[tuple[int, int], Manifest] = field(default_factory=dict)
    """... and what this worker has of them, by model and rank."""

    def forget(self) -> None:
        """Forget what the workers of the last epoch know of each other."""
        self._sent, self._known, self._spare = {}, {}, []

    def stage(self, team: Team | None, epoch: int, step: int, kept: Kept | None) -> Staged:
        """Copy this worker's shards, and send them to others, which send theirs. Collective; blocks.

        Returns when all workers have the replicas that they should have. ``kept`` is the step before.
        """
        self.staged = None
        shards: list[ShardCopy] = []
        dealt: dict[int, Dealt] = {}
        states: dict[int, Sequence[RunState]] = {}
        for member, part in sharded_members().items():
            found = part.run_states()
            if part.is_inheriting and kept is not None:  # nothing has changed, and all have what they had
                shards += [copy for copy in kept.shards if copy.member == member]
                dealt[member] = kept.dealt[member]
            elif found is not None:
                states[member] = found
        if states:
            assert team is not None
            shards += self._replicate(team, epoch, states)
            dealt |= {member: Dealt(epoch, team.size) for member in states}
        self.staged = Staged(step, shards, dealt)
        if dealt and team is not None:
            team.gather_ints([step], WHAT)
        return self.staged

    def _replicate(self, team: Team, epoch: int, states: Mapping[int, Sequence[RunState]]) -> list[ShardCopy]:
        own = {
            member: pack((member, team.rank, epoch), each, self._find_spare(member, team.rank))
            for member, each in states.items()
        }
        channel = team.mail.new_channel()
        leaving = [
            future
            for peer in replica_ranks(team.topology, team.rank, self.count)
            for copy in own.values()
            for future in self._send(team, peer, channel, copy)
        ]
        self._sent = {member: copy.manifest for member, copy in own.items()}
        others = [
            rank
            for rank in range(team.size)
            if rank != team.rank and team.rank in replica_ranks(team.topology, rank, self.count)
        ]
        came = self._receive(team, others, channel, epoch, sorted(states))
        for future in leaving:
            team.result(future, WHAT)
        return [*own.values(), *came]

    def recycle(self, kept: Kept | None) -> None:
        """Note that a step is complete, and use the memory of the shards of the one before for the next one."""
        used = [] if self.staged is None else self.staged.shards
        self._spare = [] if kept is None else [copy for copy in kept.shards if copy not in used]

    def _find_spare(self, member: int, number: int) -> ShardCopy | None:
        return next((copy for copy in self._spare if (copy.member, copy.number) == (member, number)), None)

    def _send(self, team: Team, peer: int, channel: int, copy: ShardCopy) -> list[Any]:
        is_known = self._sent.get(copy.member) == copy.manifest
        manifest = b"" if is_known else json.dumps(copy.manifest).encode()
        row, exact = copy.row.numpy().data, copy.exact.numpy().data
        head = _HEAD.pack(len(manifest), row.nbytes, exact.nbytes)
        messages = [memoryview(head), memoryview(manifest), row, exact]
        return [
            team.mail.send(peer, Tag(channel, 4 * copy.member + kind), data)
            for kind, data in enumerate(messages)
            if data.nbytes
        ]

    def _receive(
        self, team: Team, others: Sequence[int], channel: int, epoch: int, members: Sequence[int]
    ) -> list[ShardCopy]:
        heads = {
            (rank, member): team.mail.expect(rank, Tag(channel, 4 * member), memoryview(bytearray(_HEAD.size)))
            for rank in others
            for member in members
        }
        coming = []
        for (rank, member), future in heads.items():
            sizes = _HEAD.unpack(team.result(future, WHAT))
            old = self._find_spare(member, rank)
            text = bytearray(sizes[0])
            row = _room(sizes[1], None if old is None else old.row)
            exact = _room(sizes[2], None if old is None else old.exact)
            places = [memoryview(text), row.numpy().data, exact.numpy().data]
            arrivals = [
                team.mail.expect(rank, Tag(channel, 4 * member + kind), place)
                for kind, place in enumerate(places, start=1)
                if place.nbytes
            ]
            coming.append((rank, member, text, row, exact, arrivals))
        found = []
        for rank, member, text, row, exact, arrivals in coming:
            for arrival in arrivals:
                team.result(arrival, WHAT)
            if text:
                self._known[member, rank] = json.loads(bytes(text))
            found.append(ShardCopy(member, rank, epoch, self._known[member, rank], row, exact))
        return found


def sharded_members() -> dict[int, Sharded]:
    """Return the models whose state is spread over the workers, by their number among all that live on."""
    found = ((number, getattr(member, "sharded", None)) for number, member in enumerate(living_on()))
    return {number: part for number, part in found if part is not None}


def find_sources(
    dealt: Mapping[int, Dealt], holdings: Sequence[Sequence[tuple[int, int, int]]]
) -> tuple[dict[tuple[int, int], int], list[tuple[int, int]]]:
    """Return who sends each shard (model, number), as evenly as possible, and the shards that nobody has. Pure.

    ``holdings`` are the shards of the last complete step that each rank has, as (model, number, epoch).
    """
    source: dict[tuple[int, int], int] = {}
    lost: list[tuple[int, int]] = []
    load = [0] * len(holdings)
    for member, (epoch, shards) in sorted(dealt.items()):
        for number in range(shards):
            holders = [rank for rank, held in enumerate(holdings) if (member, number, epoch) in held]
            if not holders:
                lost.append((member, number))
                continue
            chosen = min(holders, key=lambda rank: (load[rank], rank))
            load[chosen] += 1
            source[member, number] = chosen
    return source, lost


def hand_on(
    team: Team | None,
    sources: Mapping[tuple[int, int], int],
    mine: Sequence[ShardCopy],
) -> None:
    """Let models go on from shards: all get the exact weights now, and owners their state at the next step. Collective.

    ``mine`` are this worker's shards of the last complete step.
    """
    rank = 0 if team is None else team.rank
    held = {(copy.member, copy.number): copy for copy in mine}
    sending = {key: held[key].manifest for key, holder in sources.items() if holder == rank}
    told = [{"member": member, "number": number, "manifest": each} for (member, number), each in sending.items()]
    everybody: list[list[dict[str, Any]]] = [told] if team is None else team.gather_json(told)
    manifests: dict[tuple[int, int], Manifest] = {
        (each["member"], each["number"]): each["manifest"] for some in everybody for each in some
    }
    for member, part in sharded_members().items():
        numbers = sorted(number for which, number in sources if which == member)
        found = []
        for number in numbers:
            key = (member, number)
            manifest, holder = manifests[key], sources[key]
            copy = held[key] if holder == rank else None
            found.append(Source(holder, manifest, copy))
            exact = torch.empty(exact_bytes(manifest), dtype=torch.uint8, device="cpu") if copy is None else copy.exact
            _broadcast(team, exact, holder)
            for run, values in exact_runs(manifest, exact):
                part.set_exact(run, values)
        if found:
            part.inherit(Inheritance(found, team))


def _broadcast(team: Team | None, row: Tensor, source: int) -> None:
    if team is None or not len(row):
        return
    for future in team.start_broadcast(row.numpy().data, source):
        team.result(future, "the exact weights of the last complete step")


def _room(size: int, old: Tensor | None) -> Tensor:
    return old if old is not None and len(old) == size else torch.empty(size, dtype=torch.uint8, device="cpu")
