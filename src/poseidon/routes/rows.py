"""Step 3, rows: an embedding's gradient travels as the rows that this step touched.

The engine lets autograd make a sparse gradient, so a full one never exists before the exchange. Each worker sums its
own duplicates first; then every worker adds all rows in rank order. Rows of one worker are distinct, so no two
additions of one call hit the same row and the result does not depend on the device's order.

Tables that share messages are packed and added up together (``table_groups.py``), once the last of them is ready. On
CUDA another thread packs them, because that waits for the device: autograd continues meanwhile.

An optimizer that wants a full gradient gets one that is zero but for those rows. In host memory, it lies in memory of
an earlier step: the system takes many times as long to map so many fresh pages as it takes to clear these. They are
cleared while the rows travel.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from poseidon.planning.shipments import LEAST_SAVED_S, SLOW_BYTES_PER_S
from poseidon.routes.allreduce import average_now
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, Flag, LiveItem, LiveUnit
from poseidon.routes.parcels import Gathered, Parcel
from poseidon.routes.table_groups import Part, TableGroup, add_rows, group_tables
from poseidon.sums.events import record
from poseidon.team.team import Team
from poseidon.wire.pool import Pool

_URGENT = -1
"""The device runs this stream first: all workers wait for the rows."""


class RowsExchanger(Exchanger):
    """Exchanges the touched rows of embedding units; calls may come in any order."""

    def __init__(self, context: Context) -> None:
        self._team = context.team
        self._pairs = context.pairs
        rate = context.cluster.crossing.bytes_per_s
        self._is_slow = rate <= SLOW_BYTES_PER_S
        self._least_on_device = LEAST_SAVED_S * rate / max(context.cluster.workers - 1, 1)
        """Bytes of a part that may be worth a device's look for repeated rows."""
        self._packs_aside = context.is_cuda
        self._room = Pool(0)
        self._waiting: dict[tuple[int, tuple[int, ...]], dict[int, _Table]] = {}
        """By step and shipment: tables that wait for the others, by unit."""
        self._groups: dict[tuple[int, ...], list[TableGroup]] = {}
        """By shipment."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def prepare(self, items: Sequence[LiveItem]) -> None:
        """Make room for the full gradients."""
        weights = [item.unit.weight for item in items if not item.unit.spec.is_sparse]
        # A pool rounds sizes up by a quarter at most.
        self._room = Pool(sum(weight.nbytes for weight in weights) * 5 // 4) if weights else self._room

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:
        """Send the touched rows with the last table of a shipment; a sparse ``.grad`` is None until it has landed."""
        unit = item.unit
        gradient = unit.weight.grad
        flags = Flag(0)
        if gradient is not None and not gradient.is_sparse:
            # The table was also used in a way that makes a full gradient; an allreduce averages that part later.
            flags, gradient = Flag.HAS_DENSE, None
            if brought[0].holds_before:
                flags |= Flag.HOLDS_BEFORE
        else:
            unit.weight.grad = None
        exchange = _RowsExchange(self._team, unit, brought[0], flags, gradient if unit.spec.is_sparse else None)
        shipment = item.item.shipment or (unit.index,)
        waiting = self._waiting.setdefault((step, shipment), {})
        stream = torch.cuda.current_stream(unit.weight.device) if unit.weight.is_cuda else None
        waiting[unit.index] = _Table(exchange, gradient, stream)
        if len(waiting) == len(shipment):
            del self._waiting[step, shipment]
            self._leave(shipment, waiting, step)
        return exchange

    def _leave(self, shipment: tuple[int, ...], tables: dict[int, _Table], step: int) -> None:
        if shipment not in self._groups:
            self._groups[shipment] = group_tables(
                [tables[unit].exchange.unit for unit in shipment], self._is_slow, self._least_on_device
            )
        loads = []
        for group in self._groups[shipment]:
            mine = [tables[unit.index] for unit in group.units]
            joint = _Joint(self._team, group, [table.exchange for table in mine], self._room)
            loads.append((joint, [table.gradient for table in mine]))
        streams = {table.stream for table in tables.values() if table.stream is not None}
        ready = [record(stream) for stream in streams]
        if ready or self._packs_aside:
            self._pairs.call_later(partial(self._send, loads, step, ready))
        else:
            self._send(loads, step)

    def _send(
        self,
        loads: Sequence[tuple[_Joint, Sequence[Tensor | None]]],
        step: int,
        ready: Sequence[torch.cuda.Event] = (),
    ) -> None:
        firsts = tuple(joint.group.units[0].index for joint, _ in loads)
        shipment = firsts if len(firsts) > 1 else ()
        try:
            for event in ready:  # then any stream may read the gradients
                event.synchronize()
            parcels = [self._pack(joint, gradients, step, shipment) for joint, gradients in loads]
        except BaseException as error:
            for joint, _ in loads:
                joint.future.set_exception(error)
            raise
        for parcel, (joint, _) in zip(parcels, loads, strict=True):
            self._pairs.start(parcel, joint.future)

    @torch.no_grad()
    def _pack(self, joint: _Joint, gradients: Sequence[Tensor | None], step: int, shipment: tuple[int, ...]) -> Parcel:
        group, flags = joint.group, [member.flags for member in joint.members]
        device = group.weight.device
        if device.type == "cuda":
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device, priority=_URGENT)
            with torch.cuda.device(device), torch.cuda.stream(self._streams[device]):
                host, distinct, settle = group.pack(gradients, flags)
                if settle is not None:
                    settle()  # on a thread that may wait; then the gradients' memory is free
        else:
            host, distinct, _ = group.pack(gradients, flags)
        unit = group.units[0]
        return Parcel(
            unit.index,
            unit.name,
            step,
            host.view(-1, 1),
            distinct,
            shipment=shipment,
            meanwhile=None if unit.spec.is_sparse or device.type == "cuda" else joint.clear_room,
            stage=_pin if device.type == "cuda" else _keep,
            form="rows",
        )


@dataclass(frozen=True, eq=False)
class _Table:
    """A table that is ready to leave."""

    exchange: _RowsExchange
    gradient: Tensor | None
    """Sparse; None if this worker touched no row."""
    stream: torch.cuda.Stream | None
    """Makes the gradient."""


class _RowsExchange(Exchange):
    joint: _Joint
    table: int
    """Its position in the group."""

    def __init__(self, team: Team, unit: LiveUnit, brought: Brought, flags: Flag, sent: Tensor | None) -> None:
        self.flags = flags
        self._sent = sent
        """A sparse gradient that was here: it stays if no worker has used the table since."""
        self.unit = unit
        self.brought = brought
        self._team = team

    def finish(self, is_used: bool) -> None:
        unit, brought, joint = self.unit, self.brought, self.joint
        joint.wait()
        if not is_used:
            if self._sent is not None:
                unit.weight.grad = self._sent
            elif not unit.spec.is_sparse:
                unit.weight.grad, brought.kept = brought.kept, None
            return
        has_dense = joint.has(self.table, Flag.HAS_DENSE)
        if joint.is_whole and not has_dense:
            unit.weight.grad = joint.take_mean(self.table)
            return
        if has_dense:
            if brought.kept is not None and joint.has(self.table, Flag.HOLDS_BEFORE):
                mine = unit.weight.grad
                unit.weight.grad = brought.kept if mine is None else brought.kept.add_(mine)
                brought.kept = None
            average_now(self._team, (unit.weight,), unit.name)
        total = unit.weight.grad
        if brought.kept is not None:
            total = brought.kept if total is None else brought.kept.add_(total)
            brought.kept = None
        if total is None:
            total = torch.zeros_like(unit.weight)
        add_rows(total, joint.parts_of(self.table))
        unit.weight.grad = total


class _Joint:
    """The tables of one group in one step: what all workers brought for them, and their means.

    The means lie in one piece of memory, unless one of the tables has more to add than rows.
    """

    is_whole: bool
    """Whether the means are made together; known once everything is here."""

    def __init__(self, team: Team, group: TableGroup, members: Sequence[_RowsExchange], room: Pool) -> None:
        self.group = group
        self.members = members
        self.future: Future[Gathered] = Future()
        self._team = team
        self._room = room
        self._heads: list[tuple[list[int], list[int]]] = []
        """By rank: the tables' flags, and where their rows begin and end."""
        self._cleared: Tensor | None = None
        self._means: list[Tensor | None] = []
        self._parts: list[Part] = []
        self._gathered: Gathered | None = None
        self._has_dense = False
        self._is_landing = False
        self._clearing = threading.Lock()
        self._landing = threading.RLock()
        for table, member in enumerate(members):
            member.joint, member.table = self, table

    @property
    def _is_sparse(self) -> bool:
        return self.group.units[0].spec.is_sparse

    @property
    def _is_plain(self) -> bool:
        """Whether no table has anything but rows to add, as far as this worker knows."""
        return all(not member.flags and member.brought.kept is None for member in self.members)

    def clear_room(self) -> None:
        """Make the zeros to which the rows will be added, if they are likely to be needed."""
        with self._clearing:
            if not self._is_landing and self._is_plain:
                self._cleared = self._zeros()

    def wait(self) -> None:
        """Wait until everything is here; the first call reads what the workers said of the tables."""
        with self._landing:
            if self._is_landing:
                return
            self._gathered = self._team.result(self.future, self.group.units[0].name)
            with self._clearing:  # until the room is cleared, if that is under way
                self._is_landing = True
            self._heads = [self.group.read_head(part) for part in self._gathered.parts]
            self._has_dense = any(self.has(table, Flag.HAS_DENSE) for table in range(len(self.members)))
            self.is_whole = self._is_sparse or (self._is_plain and not self._has_dense)
            if not self.is_whole:
                self._cleared = None

    def has(self, table: int, flag: Flag) -> bool:
        """Return whether some worker has raised a flag for a table."""
        return any(flags[table] & flag for flags, _ in self._heads)

    def parts_of(self, table: int) -> list[Part]:
        """Return what the workers brought for one table."""
        return self.group.parts_of(table, self._unpack(), [ends for _, ends in self._heads])

    def take_mean(self, table: int) -> Tensor:
        """Return a table's mean, once; only if :attr:`is_whole`."""
        with self._landing:
            if not self._means:
                self._means = self._make_means()
            mean, self._means[table] = self._means[table], None
        assert mean is not None, f"{self.group.units[table].name} was taken twice"
        return mean

    def _make_means(self) -> list[Tensor | None]:
        parts = self._unpack()
        if not self._has_dense:
            self._parts = []
        if self._is_sparse:
            return list(self.group.sparse_means(parts, [ends for _, ends in self._heads]))
        cleared, self._cleared = self._cleared, None
        flat = self._zeros() if cleared is None else cleared
        add_rows(flat, parts)
        return list(self.group.cut(flat))

    def _unpack(self) -> list[Part]:
        """Return what the workers brought, on the tables' device."""
        with self._landing:
            if self._gathered is not None:
                gathered, self._gathered = self._gathered, None
                for part, distinct, (_, ends) in zip(gathered.parts, gathered.flags, self._heads, strict=True):
                    data = part.to(self.group.weight.device, non_blocking=True)
                    self._parts.append(self.group.unpack(data, ends[-1], distinct))
            return self._parts

    def _zeros(self) -> Tensor:
        """Return zeros; in host memory from ``room``, which gets it back when nothing refers to it any more."""
        weight, shape = self.group.weight, (self.group.starts[-1], self.group.width)
        size_bytes = shape[0] * shape[1] * weight.element_size()
        if weight.is_cuda or not size_bytes:
            return torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        return torch.frombuffer(self._room.lend(size_bytes), dtype=weight.dtype).view(shape).zero_()


def _keep(rows: Tensor) -> Tensor:
    """Leave rows where they arrived."""
    return rows


def _pin(rows: Tensor) -> Tensor:
    """Copy rows to memory from which the device can fetch them by itself; the allocator of such memory reuses it."""
    return torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True).copy_(rows)
