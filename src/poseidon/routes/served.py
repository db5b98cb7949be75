"""Step 3, served: gradients go to the owners of their chunks, which take the optimizer's step and send weights back.

The route of ``poseidon.distribute(..., update="server")``, and only of that. As with ``sharded``, the owner of a chunk
adds the parts in rank order (``sums/``). Then it steps the user's optimizer on its chunk (``shard.py``), and what comes
back is the new weights. A worker that looks at a mean gradient, at the exact value of a weight that was sent rounded,
or at the optimizer's state, fetches it from the owners (``sums/fetching.py``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from poseidon.errors import UnsupportedError, WorkerLostError
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, LiveItem
from poseidon.routes.buckets import Bucket
from poseidon.routes.shard import Order, Shard, State, flat_memory, read_state
from poseidon.routes.sharded import FORMATS, HostExchange, agree_on_device, as_numpy
from poseidon.routes.split import RowSender, row_width
from poseidon.routes.staging import StagedExchange, Stager
from poseidon.sums.arithmetic import Adder
from poseidon.sums.chunks import Chunk
from poseidon.sums.device import DeviceAdder, is_compacted
from poseidon.sums.fetching import Answer, Ask, FetchDesk
from poseidon.sums.host import host_adders
from poseidon.sums.means import DeviceMeans, HostMeans, Lane, MeanMaker
from poseidon.sums.server import SumServer
from poseidon.sums.slots import Slot, chunk_bytes_for, make_slots
from poseidon.sums.stepping import DEVICE_VALUES, HOST_VALUES, StepAdder, StepThread
from poseidon.sums.touched import rows_in_chunk
from poseidon.team.membership import PeerLostError
from poseidon.team.team import Team
from poseidon.team.wiring import connect_wire
from poseidon.wire.formats import Array, find_format

ALIGNMENT = 64
"""Chunks end at multiples of so many values of a parameter: fused optimizers on CPUs round the last few values of a
tensor, which do not fill a vector, differently."""


class ServedExchanger(Exchanger):
    """Exchanges gradients for weights; calls may come in any order."""

    def __init__(self, context: Context) -> None:
        team = self.team = context.team
        link = context.cluster.between
        self._rounded = context.rounded
        self._chunk_bytes = chunk_bytes_for(link.bytes_per_s)
        self._transport = connect_wire(team, range(team.size), link=link, route="served")
        self._server = SumServer(self._transport)
        self._desk = FetchDesk(self._transport)
        self._transport.listen_lost(self._lose)
        stream = self._stream = torch.cuda.Stream(priority=-1) if context.is_cuda else None
        self._lane: Lane = contextlib.nullcontext if stream is None else lambda: torch.cuda.stream(stream)
        self._thread = StepThread(self._lane, HOST_VALUES if stream is None else DEVICE_VALUES)
        self._device = agree_on_device(team, self._transport.settings, context.is_cuda)
        self._stager = Stager() if context.is_cuda else None
        self._rows = RowSender(self._server)
        self._slots: dict[LiveItem, Slot] = {}
        self._adders: dict[LiveItem, StepAdder] = {}
        self._versions: dict[LiveItem, int] = {}
        """Of the last exchange of each item; 0 before the first..."""
        self._ordered: dict[LiveItem, int] = {}
        """... and of the last that was ordered to be stepped here."""
        self.shard = Shard([], team.rank, self._rounded)
        self.under_way: dict[LiveItem, StepExchange] = {}
        """Exchanges whose weights have not been taken."""

    @property
    def items(self) -> list[LiveItem]:
        """All items, in the order in which they become ready."""
        return [*self._slots]

    def prepare(self, items: Sequence[LiveItem]) -> None:
        """Agree on the owners of all chunks, which take the weights of theirs from the model. Called once."""
        assert not self._slots, "owners cannot change: they keep the optimizer's state"
        team = self.team
        dtypes = [item.parameters[0].dtype for item in items]
        itemsizes = [dtype.itemsize for dtype in dtypes]
        cut = make_slots(0, [item.item.numel for item in items], itemsizes, team.size, self._chunk_bytes)
        for item, slot, dtype in zip(items, cut, dtypes, strict=True):
            if not self._is_on_device(slot, dtype):
                slot = align(slot, [p.numel() for p in item.parameters])
            self._slots[item] = replace(slot, width=row_width(item))
        self._versions = dict.fromkeys(items, 0)
        self._ordered = dict(self._versions)
        self.shard = Shard(self._slots.items(), team.rank, self._rounded)
        self._adders = dict(zip(items, self._make_adders(dtypes), strict=True))
        booked = [(slot, self._adders[item]) for item, slot in self._slots.items()]
        self._server.book(booked)
        self._desk.book(booked)
        # Nobody may send before all workers know the slots.
        team.gather_ints([len(items)], "the parameter server")

    def _make_adders(self, dtypes: Sequence[torch.dtype]) -> Iterator[StepAdder]:
        rank, size, device = self.team.rank, self.team.size, self._device
        kinds = list(zip(self._slots.values(), dtypes, strict=True))
        names = [FORMATS[dtype][0] for slot, dtype in kinds if not self._is_on_device(slot, dtype)]
        on_host = iter(host_adders([slot for slot, dtype in kinds if not self._is_on_device(slot, dtype)], names, rank))
        for slot, dtype in kinds:
            adder: Adder
            means: MeanMaker
            if self._is_on_device(slot, dtype):
                assert device is not None
                # The owner divides: what others restore is weights. Halves are divided as they are rounded.
                adder = DeviceAdder(slot, rank, size, device, 1 if dtype is torch.float32 else size, dtype)
                means = DeviceMeans(adder, dtype, size, self._lane)
            else:
                adder = next(on_host)
                means = HostMeans(adder, find_format(FORMATS[dtype][0]), dtype, size)
            yield StepAdder(adder, slot, rank, means, self.shard, self._thread)

    def _is_on_device(self, slot: Slot, dtype: torch.dtype) -> bool:
        return self._device is not None and is_compacted(slot, dtype)

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> StepExchange:
        """Send the gradients of an item to the owners of its chunks; of a table, what the head has not sent."""
        slot = self._slots[item]
        if not slot.width:
            with torch._C.DisableTorchFunctionSubclass():
                return self._send(item, item.pack())
        mine = brought[0] if brought else Brought()
        with torch._C.DisableTorchFunctionSubclass():
            rest = item.unit.weight.grad
        if mine.early is None:
            if mine.head is None:
                mine.head = torch.zeros_like(_bucket(item).flat).view(item.unit.weight.shape)
            if rest is not None and not rest.is_sparse:
                mine.give_head(rest)
                rest = None
            self.start_early(item, mine, step)
        self._rows.send(slot, self._versions[item], rest)
        return self.under_way[item]

    def start_early(self, item: LiveItem, brought: Brought, step: int) -> None:  # noqa: ARG002 - versions count here
        """Send the gradient of a table's head to the owners of its chunks, which wait for the rows."""
        assert brought.head is not None
        flat = _bucket(item).flat
        flat.copy_(brought.head.view(-1))
        brought.head, brought.early = None, self._send(item, flat)

    def _send(self, item: LiveItem, flat: Tensor) -> StepExchange:
        slot = self._slots[item]
        self._versions[item] += 1
        version = self._versions[item]
        name = item.name
        # Reserved now, because the values come later where they are on a device.
        begin = self._server.reserve(slot, version)
        back: Exchange
        if self._is_on_device(slot, flat.dtype):
            back = (
                _DeviceArrival(self.team, begin(flat), item)
                if flat.dtype is torch.float32
                else StagedExchange(self.team, begin(flat), name, flat.device)
            )
        elif self._stager is not None:
            back = self._stager.start(flat, slot.number, lambda host: begin(as_numpy(host)), self.team, name)
        else:
            back = HostExchange(self.team, begin(as_numpy(flat)), name)
        exchange = StepExchange(version, back)
        self.under_way[item] = exchange
        return exchange

    def order(self, order: Order) -> None:
        """Let the chunks owned here be stepped, of everything under way."""
        if self._stream is not None:
            order = replace(order, ready=torch.cuda.current_stream().record_event())
        for item in sorted(self.under_way, key=lambda item: self._slots[item].priority):
            version = self._ordered[item] = self.under_way[item].version
            self._adders[item].order(version, order)

    def means(self) -> Iterator[tuple[Chunk, Tensor]]:
        """Wait for the sums of all chunks owned here, and return their means."""
        for item, exchange in self.under_way.items():
            self.team.result(self._adders[item].when_summed(exchange.version), item.name)
            self.await_steps()
            yield from self._adders[item].means()

    def await_steps(self) -> None:
        """Let the current stream wait for what the owner's steps have computed."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def runs_by_owner(self) -> list[list[tuple[nn.Parameter, int, int]]]:
        """Return the pieces that each rank owns: parameter, and where in it the piece begins and ends."""
        found: list[list[tuple[nn.Parameter, int, int]]] = [[] for _ in range(self.team.size)]
        for item, slot in self._slots.items():
            for chunk in slot.chunks:
                found[chunk.owner] += runs(item, chunk)
        return found

    def fetch(self, item: LiveItem, what: Ask) -> list[tuple[Chunk, Answer]]:
        """Return what the owners have of an item's chunks; blocks."""
        version = (self._versions if what is Ask.MEAN else self._ordered)[item]
        asked = [(chunk, self._desk.fetch(chunk, what, version)) for chunk in self._slots[item].chunks]
        return [(chunk, self._result(future, item)) for chunk, future in asked]

    def fetch_means(self, item: LiveItem) -> Tensor:
        """Return the mean gradients of an item, in new memory: weights may be arriving in the bucket's."""
        flat = torch.empty_like(_bucket(item).flat)
        self._fill(flat, self.fetch(item, Ask.MEAN))
        return flat

    def fetch_weights(self, item: LiveItem) -> tuple[Tensor, bool]:
        """Return the exact weights, in new memory too, and whether the owners send exact ones from now on."""
        found = self.fetch(item, Ask.WEIGHTS)
        flat = torch.empty_like(_bucket(item).flat)
        self._fill(flat, found)
        return flat, all(answer.is_exact_later for _, answer in found)

    def ask_rows(self, item: LiveItem, numbers: Array) -> Callable[[], Tensor]:
        """Ask for exact rows of an item that is one table; ``numbers`` ascend. What is returned waits for them."""
        width, version = item.parameters[0].shape[1], self._ordered[item]
        asked = []
        for chunk in self._slots[item].chunks:
            where, mine = rows_in_chunk(numbers, chunk, width)
            if mine.size:
                asked.append((where, self._desk.fetch(chunk, Ask.ROWS, version, mine)))

        def wait() -> Tensor:
            bits = np.zeros((len(numbers), width), np.int32)
            for where, future in asked:
                # A row may lie in two chunks, each of which has zeros for the other's bits.
                bits[where] |= np.frombuffer(self._result(future, item).payload, np.int32).reshape(-1, width)
            return torch.from_numpy(bits).view(torch.float32)

        return wait

    def _fill(self, flat: Tensor, found: Sequence[tuple[Chunk, Answer]]) -> None:
        for chunk, answer in found:
            flat[chunk.start : chunk.stop].copy_(torch.frombuffer(answer.payload, dtype=flat.dtype))

    def fetch_state(self, item: LiveItem, full: State) -> None:
        """Add the optimizer's state of an item's parameters to ``full``."""
        for chunk, answer in self.fetch(item, Ask.STATE):
            if answer.is_past:
                raise UnsupportedError(
                    f"rank {self.team.rank} looked at the optimizer's state between backward() and step(), when rank "
                    f"{chunk.owner} had taken the step already, and with it the state of {item.name}; "
                    'with update="server" look at it after step(), or before backward()'
                )
            read_state(answer.payload, [*runs(item, chunk)], full)

    def leave(self) -> None:
        """Answer the others until nobody asks any more, or there is no hope that somebody ends."""
        # Whoever does not end is not needed any more, and others than this worker will say so.
        with contextlib.suppress(WorkerLostError):
            self.team.result(self._desk.leave(), "the others to end")

    def close(self) -> None:
        """Stop the threads and close the connections."""
        self._rows.close()
        if self._stager is not None:
            self._stager.close()
        if self._device is not None:
            self._device.close()
        self._thread.close()
        self._transport.close()

    def _result(self, future: Future[Answer], item: LiveItem) -> Answer:
        return self.team.result(future, item.name)

    def _lose(self, peer: int, why: str) -> None:
        error = PeerLostError(peer, why)
        self._server.fail(error)
        self._desk.fail(error)


class StepExchange(Exchange):
    """Gradients on their way to the owners, or weights on their way back."""

    def __init__(self, version: int, back: Exchange) -> None:
        self.version = version
        self._back = back

    def finish(self, is_used: bool) -> None:
        """Wait for the weights, which then lie where the gradients lay; they come only after an order to step."""
        self._back.finish(is_used)


class _DeviceArrival(Exchange):
    """Weights, some of them as changes from what this worker has."""

    def __init__(self, team: Team, future: Future[Callable[[Tensor], None]], item: LiveItem) -> None:
        self._team = team
        self._future = future
        self._item = item

    def finish(self, is_used: bool) -> None:  # noqa: ARG002
        """Restore the weights where the gradients lay."""
        restore = self._team.result(self._future, self._item.name)
        restore(torch.cat([flat_memory(parameter) for parameter in self._item.parameters]))


def align(slot: Slot, sizes: Sequence[int]) -> Slot:
    """Return a slot whose chunks end at multiples of :data:`ALIGNMENT` in parameters of these sizes."""
    starts = [0, *itertools.accumulate(sizes)]
    chunks: list[Chunk] = []
    begin = 0
    for chunk in slot.chunks:
        end = chunk.stop
        if chunk is not slot.chunks[-1]:
            first, last = next(pair for pair in itertools.pairwise(starts) if pair[0] < end <= pair[1])
            end = min(first + round((end - first) / ALIGNMENT) * ALIGNMENT, last)
        if end > begin:
            chunks.append(Chunk(chunk.slot, len(chunks), begin, end, chunk.owner))
            begin = end
    return Slot(slot.number, tuple(chunks), slot.priority)


def runs(item: LiveItem, chunk: Chunk) -> Iterable[tuple[nn.Parameter, int, int]]:
    """Return the pieces of a chunk: parameter, and where in it the piece begins and ends."""
    begin = 0
    for parameter in item.parameters:
        end = begin + parameter.numel()
        first, last = max(begin, chunk.start), min(end, chunk.stop)
        if first < last:
            yield parameter, first - begin, last - begin
        begin = end


def _bucket(item: LiveItem) -> Bucket:
    assert item.bucket is not None
    return item.bucket
