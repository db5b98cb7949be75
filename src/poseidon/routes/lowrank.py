"""Step 3, lossy: matrices travel as products of two narrow ones (PowerSGD), with warm start and error feedback.

``sums/lowrank.py`` has the idea. Both factors go through the parameter server (``sums/``): the first ones as exact
sums, the second, longer ones rounded to bf16. All workers receive the same bytes; what they compute from them is alike
on equal machines, as with ``factors``. The first factors leave as soon as an item's gradients are final. A thread of
its own makes the received ones orthonormal and lets the second ones leave, while backward goes on or, under
``distribute``, the next forward.

What a worker keeps is what the product of P and its own Q lacks of its own gradient, where its own Q is what arrived
of it: without what was rounded off, of its part or, where it owns a chunk, of the sum. The mean is the product of P and
the mean Q, so all that was sent and all that is kept add up to all gradients.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poseidon.errors import UnsupportedError
from poseidon.planning.lossy import as_matrix
from poseidon.routes.base import Brought, Context, Exchange, Exchanger, LiveItem
from poseidon.routes.feedback import Feedback
from poseidon.routes.rounded import fixed_slots, take_back
from poseidon.sums.events import Waiter, record
from poseidon.sums.feedback import LossyAdder
from poseidon.sums.host import host_adders
from poseidon.sums.lossy import Bf16Codec
from poseidon.sums.lowrank import host_digest, is_finite, orthonormalize, split_bucket, sum_of_sizes
from poseidon.sums.lowrank_products import kernel_digest, make_products
from poseidon.sums.server import SumServer
from poseidon.sums.slots import Slot
from poseidon.team.membership import PeerLostError
from poseidon.team.team import CLOSE_S, Team
from poseidon.team.wiring import connect_wire
from poseidon.wire.formats import Array, find_format
from poseidon.wire.pool import Pool

_log = logging.getLogger(__name__)

FIRST_CHUNK_BYTES, SECOND_CHUNK_BYTES = 1 << 15, 1 << 17
"""Few bytes travel, in four hops that wait for each other, so even a short factor is dealt to all owners: one of 800 kB
crosses eight links of 1 Gbit/s in a third of the time that three owners take."""
_URGENT = -1
"""The wire waits for what these streams do; backward's kernels can wait better."""


class LowRankExchanger(Exchanger):
    """Averages buckets in low rank over the team; calls may come in any order."""

    def __init__(self, context: Context, rank: int) -> None:
        team = self._team = context.team
        _check_alike(team)
        self._rank = rank
        self._has_kernels = context.is_cuda and _have_kernels(team, rank)
        self._feedback = context.feedback
        self._transport = connect_wire(team, range(team.size), link=context.cluster.between, route="lowrank")
        self._server = SumServer(self._transport)
        self._transport.listen_lost(lambda peer, why: self._server.fail(PeerLostError(peer, why)))
        self._lanes: dict[torch.device, _Lanes] = {}
        self._narrow: dict[LiveItem, _Narrow] = {}
        self._booked = 0
        self._chores: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._helper = threading.Thread(target=self._help, name="poseidon-low-rank", daemon=True)
        self._helper.start()

    def prepare(self, items: Sequence[LiveItem]) -> None:
        """Agree on two slots for each bucket: for the first factors, and for the second ones."""
        team = self._team
        self._narrow = {
            item: _Narrow(
                item, self._rank, self._feedback, self._lanes_of(item.parameters[0].device), self._has_kernels
            )
            for item in items
        }
        narrow = list(self._narrow.values())
        lefts = fixed_slots(self._booked, items, [one.layout.left_size for one in narrow], team.size, FIRST_CHUNK_BYTES)
        second = self._booked + len(items)
        rights = fixed_slots(second, items, [one.layout.right_size for one in narrow], team.size, SECOND_CHUNK_BYTES)
        self._booked = second + len(items)
        for one, left, right in zip(narrow, lefts, rights, strict=True):
            one.slots = left, right
        slots = [*lefts, *rights]
        exact = host_adders(lefts, ["float32"] * len(lefts), team.rank, team.size)
        pool, codec, float32 = Pool(), Bf16Codec(), find_format("float32")
        rounded = [
            LossyAdder(slot, team.rank, codec, one.host_lost, float32, pool, team.size)
            for slot, one in zip(rights, narrow, strict=True)
        ]
        self._server.book(zip(slots, [*exact, *rounded], strict=True))
        # Nobody may send before all workers know the slots.
        team.gather_ints([len(slots)], "the parameter server")

    def start(self, item: LiveItem, brought: Sequence[Brought], step: int) -> Exchange:  # noqa: ARG002
        """Send the first factors; the rest follows by itself."""
        exchange = _LowRankExchange(self._team, self._narrow[item], item, self._feedback)
        left, right = (self._server.reserve(slot, step) for slot in exchange.narrow.slots)

        def send_left() -> None:
            _follow(left(exchange.narrow.host_left), lambda: self._later(turn, exchange), exchange.fail)

        def turn() -> None:
            exchange.turn(send_right)

        def send_right() -> None:
            _follow(right(exchange.narrow.host_right), lambda: self._later(exchange.land, exchange), exchange.fail)

        exchange.begin(send_left)
        return exchange

    def close(self) -> None:
        """Stop the threads and close the connections."""
        self._chores.put(None)
        self._helper.join(timeout=CLOSE_S)
        for lanes in self._lanes.values():
            lanes.close()
        self._transport.close()

    def _lanes_of(self, device: torch.device) -> _Lanes | None:
        if device.type != "cuda":
            return None
        if device not in self._lanes:
            self._lanes[device] = _Lanes(device)
        return self._lanes[device]

    def _later(self, chore: Callable[[], None], exchange: _LowRankExchange) -> None:
        """Do something on the helper's thread; the wire's must not wait for arithmetic."""
        self._chores.put(partial(self._attempt, chore, exchange))

    def _attempt(self, chore: Callable[[], None], exchange: _LowRankExchange) -> None:
        try:
            chore()
        except BaseException as error:
            self._server.fail(error)
            exchange.fail(error)

    def _help(self) -> None:
        while (chore := self._chores.get()) is not None:
            with torch.no_grad():
                chore()
            del chore  # what it refers to must not live until the next one comes


def _follow(summed: Future[Any], then: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
    def done(future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            then()
        else:
            fail(error)

    summed.add_done_callback(done)


class _Lanes:
    """Streams beside a device's computation, each with a thread that waits for what it does.

    Two: a first factor waits for the backward that makes it, which the processor may have queued long before, and no
    second one may wait for that. Not one for each bucket: a device has few queues, and streams that share one wait for
    each other.
    """

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = (torch.cuda.Stream(device, _URGENT) for _ in range(2))
        self.first, self.second = Waiter("poseidon-low-rank-first"), Waiter("poseidon-low-rank-second")

    def close(self) -> None:
        """End the threads."""
        self.first.close()
        self.second.close()


class _Narrow:
    """The memory of one bucket's factors, on its device and beside it, used in one step after the other."""

    slots: tuple[Slot, Slot]

    def __init__(self, item: LiveItem, rank: int, feedback: Feedback, lanes: _Lanes | None, has_kernels: bool) -> None:
        parameters = item.parameters
        device = self.device = parameters[0].device
        shapes = [_dense_shape(parameter) for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        layout = self.layout = split_bucket(self._sizes, [as_matrix(shape, rank) for shape in shapes], rank)
        self.products = make_products(layout, self._sizes, device, has_kernels)
        self.lanes = lanes
        self.left = torch.empty(layout.left_size, dtype=torch.float32, device=device)
        self.own, self.mean, self.lost = (
            torch.zeros(layout.right_size, dtype=torch.float32, device=device) for _ in range(3)
        )
        """The second factors: this worker's, everybody's mean, and what the sum lacks of this worker's."""
        there = self.left, self.mean, self.lost
        held = [torch.zeros_like(one, device="cpu", pin_memory=True) if lanes else one for one in there]
        self.host_left, self.host_right, self.host_lost = (one.numpy() for one in held)
        self._held_left, self._held_right, self._held_lost = held
        # Made once: in a step every call of Python counts, on a thread that has a device to feed.
        self.rest = feedback.flat_of(item, device)
        self.whole_rests = self.whole_of(self.rest)
        self.base = feedback.bases_of([(parameters[one.place], one.columns) for one in layout.matrices], rank, device)
        """Q of the step before, of each matrix; alike on all workers."""
        self.bases = self._split_right(self.base)
        self.means = self._split_right(self.mean)
        self.whole_left = [self.left[span] for _, span in layout.whole]

    def whole_of(self, flat: Tensor) -> list[Tensor]:
        """Return what travels as it is of a tensor that lies as the bucket does."""
        pieces = flat.split(self._sizes)
        return [pieces[place] for place, _ in self.layout.whole]

    def fetch_left(self) -> None:
        """Copy what travels first out of the device."""
        _copy(self._held_left, self.left)

    def fetch_right(self) -> None:
        """Copy what travels then out of the device; what comes back takes its place."""
        self._held_right.copy_(self.own, non_blocking=True)

    def bring_left(self) -> None:
        """Copy what came back first to the device."""
        _copy(self.left, self._held_left)

    def bring_right(self) -> None:
        """Copy what came back then to the device, and take from this worker's own what did not arrive of it."""
        _copy(self.mean, self._held_right)
        _copy(self.lost, self._held_lost)
        self.own.sub_(self.lost)

    def _split_right(self, right: Tensor) -> list[Tensor]:
        return [right[one.right].view(one.columns, self.layout.rank) for one in self.layout.matrices]


def _copy(target: Tensor, source: Tensor) -> None:
    if target is not source:
        target.copy_(source, non_blocking=True)


class _LowRankExchange(Exchange):
    """One bucket: :meth:`begin`, then :meth:`turn` and :meth:`land` on the helper's thread, then :meth:`finish`."""

    def __init__(self, team: Team, narrow: _Narrow, item: LiveItem, feedback: Feedback) -> None:
        self.narrow = narrow
        self._team = team
        self._item = item
        self._feedback = feedback
        self._flat = item.pack()
        self._whole = narrow.whole_of(self._flat)
        self._is_sound = True
        """Whether all that came is finite."""
        self._future: Future[torch.cuda.Event | None] = Future()

    def begin(self, send: Callable[[], None]) -> None:
        """Add what was kept, make the first factors, and ``send`` them once they are in host memory."""
        narrow = self.narrow
        with torch.no_grad():
            narrow.products.make_left(self._flat, narrow.rest, narrow.base, narrow.left)
            if self._whole:
                torch._foreach_add_(self._whole, narrow.whole_rests)
                torch._foreach_copy_(narrow.whole_left, self._whole)
                torch._foreach_zero_(narrow.whole_rests)
            lanes = narrow.lanes
            if lanes is None:
                send()
                return
            lanes.out.wait_stream(torch.cuda.current_stream(narrow.device))
            with torch.cuda.stream(lanes.out):
                narrow.fetch_left()
                lanes.first.put(record(lanes.out), send, self.fail)

    def turn(self, send: Callable[[], None]) -> None:
        """Make P orthonormal, and ``send`` the second factors."""
        narrow, layout = self.narrow, self.narrow.layout
        for one in layout.matrices:
            left = narrow.host_left[one.left].reshape(one.rows, layout.rank)
            self._is_sound &= orthonormalize(left)
        with self._aside():
            narrow.bring_left()
            narrow.products.make_right(self._flat, narrow.left, narrow.own)
            narrow.host_lost.fill(0)
            narrow.fetch_right()
            if narrow.lanes is None:
                send()
            else:
                narrow.lanes.second.put(record(narrow.lanes.back), send, self.fail)

    def land(self) -> None:
        """Take the mean of the second factors, from which the next step begins."""
        narrow, lanes = self.narrow, self.narrow.lanes
        with self._aside():
            narrow.bring_right()
            views = [narrow.host_right[one.right].reshape(one.columns, -1) for one in narrow.layout.matrices]
            totals = [sum_of_sizes(view) for view in views]
            self._is_sound &= all(map(is_finite, totals, views))
            if self._is_sound:
                self._keep_bases(totals)
            self._future.set_result(None if lanes is None else record(lanes.back))

    def finish(self, is_used: bool) -> None:  # noqa: ARG002
        """Put the products in place of the gradients, and keep what they lack."""
        done = self._team.result(self._future, self._item.name)
        narrow = self.narrow
        if done is not None:
            torch.cuda.current_stream(narrow.device).wait_event(done)
        with torch.no_grad():
            if self._is_sound:
                narrow.products.restore(self._flat, narrow.rest, narrow.left, narrow.own, narrow.mean)
            else:
                # A step that a loss scaler skips: nothing of it is kept.
                self._flat.fill_(math.nan)
            if self._whole:
                torch._foreach_copy_(self._whole, narrow.whole_left)
        # The wire may know this object for another step, and a bucket goes elsewhere if its memory is in use.
        self._whole = []

    def take_back(self, used: Sequence[bool]) -> None:
        """Keep what came of gradients that nobody uses."""
        take_back(self._item, self._flat, self._feedback, used)

    def fail(self, error: BaseException) -> None:
        """End the exchange with an error; the first one stays."""
        if not self._future.done():
            self._future.set_exception(error)

    def _keep_bases(self, totals: Sequence[Array]) -> None:
        narrow = self.narrow
        if all(total.all() for total in totals):
            narrow.base.copy_(narrow.mean)
            return
        # A column of zeros would stay one: nothing would ever be sent along it.
        for base, mean, total in zip(narrow.bases, narrow.means, totals, strict=True):
            for column in np.flatnonzero(total).tolist():
                base[:, column].copy_(mean[:, column])

    def _aside(self) -> Any:
        lanes = self.narrow.lanes
        return torch.cuda.stream(lanes.back) if lanes is not None else contextlib.nullcontext()


def _dense_shape(parameter: Tensor) -> Sequence[int]:
    """Return the sizes of a parameter's dimensions in the order in which its values lie in a bucket."""
    if parameter.is_contiguous():
        return parameter.shape
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return [parameter.shape[dimension] for dimension in order]


def _check_alike(team: Team) -> None:
    """Raise :class:`UnsupportedError` unless all workers make the same P orthonormal alike. Collective."""
    digests = [row[0] for row in team.gather_ints([host_digest()], "the arithmetic of low rank")]
    if len(set(digests)) > 1:
        odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise UnsupportedError(
            f"rank {odd} ({team.watch.hosts[odd]}) and rank 0 ({team.watch.hosts[0]}) round differently (another "
            'processor or library), so lossy="lowrank" would let replicas drift apart; use "int8" there'
        )


def _have_kernels(team: Team, rank: int) -> bool:
    """Return whether the GPUs of all workers make products by kernels, and alike. Collective.

    A mean is one of these products, so where one worker used PyTorch's, its replica would drift away.
    """
    mine = kernel_digest(rank, torch.device("cuda", torch.cuda.current_device()))
    digests = [row[0] for row in team.gather_ints([mine], "the kernels of low rank")]
    if 0 not in digests and len(set(digests)) == 1:
        return True
    odd = next(place for place, digest in enumerate(digests) if digest != digests[-1] or not digest)
    if team.rank == 0:
        _log.warning(
            "low rank uses PyTorch's products, slower and in TF32 less exact: Triton's kernels do not work or round "
            "differently on rank %d (%s)",
            odd,
            team.watch.hosts[odd],
        )
    return False
