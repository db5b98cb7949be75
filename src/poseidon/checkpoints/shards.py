"""Shards: what one worker alone has of a state, as rows of bytes; how they are kept twice and dealt anew. Pure.

With ``update="server"`` the optimizer's state of a value, and its exact weight where that travels rounded, are at the
owner of its chunk only. A *run* is a part of one parameter's values; a shard has the state of some runs, and a
*manifest* says which and how it is written. Owners of another epoch own other runs, so they get parts of several
shards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from poseidon.errors import MismatchError
from poseidon.team.tensors import in_a_row
from poseidon.team.topology import Topology

if TYPE_CHECKING:
    from poseidon.team.team import Team

Manifest = list[dict[str, Any]]
"""For each run: which, its tensors (type, shape unless like the run, whether on the host), its plain values, and the
type of its exact weights, if it has them; plain data."""


class ValueRun(NamedTuple):
    """Some values of a parameter, which is known by its number in the optimizer; in the order of its memory."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True)
class RunState:
    """What the owner of a run has of it."""

    run: ValueRun
    entries: Mapping[str, Any]
    """The optimizer's state: flat tensors as long as the run, other tensors, and plain values."""
    exact: Tensor | None = None
    """The weights, if nobody else has them exactly."""


@dataclass(frozen=True, eq=False)
class ShardCopy:
    """A shard, or a replica of it, after a complete step."""

    member: int
    """Of which model, among those that live on from epoch to epoch."""
    number: int
    """Among the shards of this model: the rank of its owner..."""
    epoch: int
    """... in the epoch in which it was made."""
    manifest: Manifest
    row: Tensor
    """All bytes of the optimizer's state, in host memory..."""
    exact: Tensor
    """... and of the weights."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.row.numel() + self.exact.numel()


class Dealt(NamedTuple):
    """How a model's state is spread in the last complete step."""

    epoch: int
    shards: int
    """How many."""


@dataclass(frozen=True)
class Source:
    """A shard that somebody has when workers change."""

    holder: int
    """Its rank now."""
    manifest: Manifest
    copy: ShardCopy | None
    """None: another worker has it."""


@dataclass(frozen=True)
class Inheritance:
    """All shards of a model's state, wherever they are, for the owners of a new epoch."""

    sources: Sequence[Source]
    team: Team | None
    """Who sends them to each other; None: this worker is alone, and has all."""


class Sharded(Protocol):
    """A model whose optimizer's state is spread over the workers."""

    @property
    def is_inheriting(self) -> bool:
        """Whether the state is where :meth:`inherit` has found it: no step was taken since."""

    def as_is(self) -> AbstractContextManager[None]:
        """Let model and optimizer show what this worker has, in place of asking others for the rest."""

    def run_states(self) -> list[RunState] | None:
        """Return what this worker alone has; None if every worker has everything."""

    def inherit(self, inheritance: Inheritance) -> None:
        """Go on from shards of earlier owners; their exact weights are in place already."""

    def set_exact(self, run: ValueRun, values: Tensor) -> None:
        """Put exact weights in place."""

    def complete(self) -> None:
        """Put in place what a worker needs of others after the training. Collective."""


def replica_ranks(topology: Topology, rank: int, count: int) -> list[int]:
    """Return who keeps replicas of a worker's shard: on the next machines first, and others only if these are few."""
    places = [(machine, ranks.index(rank)) for machine, ranks in enumerate(topology.machines) if rank in ranks]
    ((mine, place),) = places
    machines = [*topology.machines[mine + 1 :], *topology.machines[:mine]]
    first = [ranks[place % len(ranks)] for ranks in machines]
    own = topology.machines[mine]
    rest = [*own[place + 1 :], *own[:place], *(other for ranks in machines for other in ranks if other not in first)]
    return [*first, *rest][:count]


def pack(label: tuple[int, int, int], states: Sequence[RunState], old: ShardCopy | None = None) -> ShardCopy:
    """Copy a shard; ``label`` is member, number and epoch. The memory of an ``old`` copy is used where it fits."""
    manifest: Manifest = []
    tensors: list[Tensor] = []
    exact: list[Tensor] = []
    for state in states:
        length = state.run.stop - state.run.start
        found: dict[str, Any] = {"run": list(state.run), "tensors": {}, "plain": {}, "exact": None}
        for key, value in state.entries.items():
            if isinstance(value, Tensor):
                shape = None if value.shape == (length,) else list(value.shape)
                found["tensors"][key] = [_name(value.dtype), shape, value.device.type == "cpu"]
                tensors.append(value)
            else:
                found["plain"][key] = value
        if state.exact is not None:
            found["exact"] = _name(state.exact.dtype)
            exact.append(state.exact)
        manifest.append(found)
    row = _join(tensors, None if old is None else old.row)
    return ShardCopy(*label, manifest, row, _join(exact, None if old is None else old.exact))


def exact_runs(manifest: Manifest, exact: Tensor) -> list[tuple[ValueRun, Tensor]]:
    """Return the exact weights of a shard, in the same memory."""
    found, at = [], 0
    for each in manifest:
        if each["exact"] is not None:
            run, dtype = ValueRun(*each["run"]), _type(each["exact"])
            size = (run.stop - run.start) * dtype.itemsize
            found.append((run, _typed(exact[at : at + size], dtype)))
            at += size
    return found


def exact_bytes(manifest: Manifest) -> int:
    """Return how many bytes the exact weights of a shard have."""
    runs = ((ValueRun(*each["run"]), each["exact"]) for each in manifest if each["exact"] is not None)
    return sum((run.stop - run.start) * _type(name).itemsize for run, name in runs)


# Dealing anew.


class ShardPart(NamedTuple):
    """Some bytes of a shard that belong to a wanted run."""

    source: int
    start: int
    stop: int
    """In the shard's row."""
    wanted: int
    key: str
    place: int | None
    """Where in the wanted run, in values; None: not one for each value."""


class _Entry(NamedTuple):
    key: str
    at: int
    dtype: torch.dtype
    shape: list[int] | None
    on_host: bool


def plan_parts(sources: Sequence[Source], wanted: Sequence[ValueRun]) -> list[ShardPart]:
    """Return which bytes of which shards make the state of these runs, in an order that all workers agree on."""
    known: dict[int, list[tuple[int, ValueRun, list[_Entry]]]] = defaultdict(list)
    for number, source in enumerate(sources):
        for run, entries in _entries(source.manifest):
            known[run.parameter].append((number, run, entries))
    parts = []
    for place, want in enumerate(wanted):
        covered = 0
        for number, run, entries in known[want.parameter]:
            first, last = max(run.start, want.start), min(run.stop, want.stop)
            if first >= last:
                continue
            covered += last - first
            for key, at, dtype, shape, _ in entries:
                if shape is None:
                    begin, end = (at + (value - run.start) * dtype.itemsize for value in (first, last))
                    parts.append(ShardPart(number, begin, end, place, key, first - want.start))
                else:
                    parts.append(ShardPart(number, at, at + math.prod(shape) * dtype.itemsize, place, key, None))
        if covered != want.stop - want.start:
            raise MismatchError(
                f"of values {want.start} to {want.stop} of parameter {want.parameter}, the shards of the last complete "
                f"step have {covered}; do all workers build the same model and optimizer?"
            )
    return parts


def take_parts(parts: Sequence[ShardPart], rows: Sequence[Tensor | None]) -> Tensor:
    """Return the bytes of parts, one after the other, from the rows of the shards that are here."""
    found = []
    for part in parts:
        row = rows[part.source]
        assert row is not None
        found.append(row[part.start : part.stop])
    return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8, device="cpu")


def assemble(
    sources: Sequence[Source],
    wanted: Sequence[ValueRun],
    parts: Sequence[ShardPart],
    came: Mapping[int, Tensor],
    devices: Sequence[torch.device],
) -> list[dict[str, Any]]:
    """Return the state of wanted runs, on their devices; ``came`` has the bytes of their parts by holder."""
    kinds = {
        (number, run.parameter, entry.key): entry
        for number, source in enumerate(sources)
        for run, entries in _entries(source.manifest)
        for entry in entries
    }
    states: list[dict[str, Any]] = [{} for _ in wanted]
    at: dict[int, int] = defaultdict(int)
    for part in parts:
        holder, size = sources[part.source].holder, part.stop - part.start
        data = came[holder][at[holder] : at[holder] + size]
        at[holder] += size
        want = wanted[part.wanted]
        entry = kinds[part.source, want.parameter, part.key]
        values = _typed(data, entry.dtype)
        device = torch.device("cpu") if entry.on_host else devices[part.wanted]
        state = states[part.wanted]
        if part.place is None:
            assert entry.shape is not None
            state[part.key] = values.reshape(entry.shape).to(device, copy=True)
            continue
        if part.key not in state:
            state[part.key] = torch.empty(want.stop - want.start, dtype=entry.dtype, device=device)
        state[part.key][part.place : part.place + len(values)] = values.to(device)
    plain = {each["run"][0]: each["plain"] for source in sources for each in source.manifest}
    for want, state in zip(wanted, states, strict=True):
        state.update(plain[want.parameter])
    return states


def _entries(manifest: Manifest) -> list[tuple[ValueRun, list[_Entry]]]:
    """Return where the tensors of each run lie in the row."""
    found, at = [], 0
    for each in manifest:
        run, entries = ValueRun(*each["run"]), []
        for key, (name, shape, on_host) in each["tensors"].items():
            dtype = _type(name)
            entries.append(_Entry(key, at, dtype, shape, on_host))
            at += (run.stop - run.start if shape is None else math.prod(shape)) * dtype.itemsize
        found.append((run, entries))
    return found


def _join(tensors: Sequence[Tensor], old: Tensor | None) -> Tensor:
    """Return the bytes of tensors in one row in host memory."""
    rows = [in_a_row(tensor).view(torch.uint8) for tensor in tensors]
    away = [row for row in rows if row.device.type != "cpu"]
    if away:  # in one copy
        here = iter(torch.cat(away).cpu().split([len(row) for row in away]))
        rows = [row if row.device.type == "cpu" else next(here) for row in rows]
    size = sum(map(len, rows))
    place = old if old is not None and len(old) == size else torch.empty(size, dtype=torch.uint8, device="cpu")
    return torch.cat(rows, out=place) if rows else place


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as values; a copy where they lie at an odd place."""
    return (data.clone() if data.storage_offset() % dtype.itemsize else data).view(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise MismatchError(f"{name!r} is no type of values")
    return found
