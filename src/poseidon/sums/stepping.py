"""Owners that take the optimizer's step: an adder whose chunks come back as weights instead of sums.

Parts go up as ever. When a sum is there and this worker's own user has called ``step()``, the owner steps its chunk of
the weights (:class:`Stepper`), on a thread of its own, and what goes down is the new weights. Everybody runs the same
program, so an owner need not ask the others whether to step, or with which learning rate.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from poseidon import failpoints
from poseidon.errors import ServerError
from poseidon.sums.arithmetic import Adder, Fail, Then
from poseidon.sums.chunks import Chunk
from poseidon.sums.device import WeightChange
from poseidon.sums.encodings import Encoded, Encoding, Payload
from poseidon.sums.fetching import Answer, Ask, Reply
from poseidon.sums.means import Lane, MeanMaker, bytes_of
from poseidon.sums.messages import Layouts
from poseidon.sums.slots import Slot
from poseidon.sums.touched import TouchedRows
from poseidon.team.team import CLOSE_S

REFRESHED = 64
"""Every so many steps, weights travel as they are and not as changes: a worker whose program has changed its own ones,
unlike the others, does not stay apart."""


HOST_VALUES, DEVICE_VALUES = 1 << 17, 1 << 26
"""How many values one call of the optimizer may step, for slots that could be stepped one after the other."""

_VALUES = (Ask.WEIGHTS, Ask.ROWS)


class Stepper(Protocol):
    """Keeps weights and optimizer state of the chunks owned here. One chunk is used by one thread at a time."""

    def changes(self, order: Any) -> bool:
        """Return whether ``order`` changes weights or state."""

    def keep(self, chunk: Chunk) -> Tensor | None:
        """Return a copy of the exact weights, where workers may ask for them."""

    def begin(self, chunks: Sequence[Chunk], order: Any) -> None:
        """Make the weights of chunks those from which ``order`` says to step, once the device no longer needs them."""

    def step(self, means: Sequence[tuple[Chunk, Tensor]], order: Any) -> None:
        """Update the weights of chunks with their mean gradients as ``order`` says; leave the means as they are."""

    def outgoing(self, chunk: Chunk) -> Tensor:
        """Return the weights of a chunk as workers get them: exact, or rounded where they only use them so."""

    def exact(self, chunk: Chunk) -> memoryview:
        """Return the exact weights."""

    def rows_of(self, chunk: Chunk, details: memoryview, earlier: Tensor | None) -> memoryview:
        """Return rows of the exact weights, or of ``earlier`` ones; bits that lie in other chunks are zero."""

    def state_of(self, chunk: Chunk) -> memoryview:
        """Return the optimizer's state."""

    def rounds(self, chunk: Chunk) -> bool:
        """Return whether workers get the weights of a chunk rounded."""

    def stop_rounding(self, chunk: Chunk) -> None:
        """Send exact weights from the next step on."""


class StepThread:
    """Runs steps, the most urgent first; those that wait together are taken together.

    A call of the optimizer costs a processor as much as a good many values do. Weights leave when the whole call is
    done, so it is given at most ``most_values``: a host's optimizer takes its time for each of them, a device's hardly.
    """

    def __init__(self, lane: Lane = contextlib.nullcontext, most_values: int = HOST_VALUES) -> None:
        self.lane = lane
        self._most_values = most_values
        self._jobs: queue.PriorityQueue[tuple[float, int, StepJob | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._work, name="poseidon-stepping", daemon=True)
        self._thread.start()

    def put(self, priority: float, job: StepJob) -> None:
        """Run ``job``; fail what it is for if that raises."""
        self._jobs.put((priority, next(self._numbers), job))

    def close(self) -> None:
        """End the thread after what it was given."""
        self._jobs.put((float("inf"), next(self._numbers), None))
        self._thread.join(timeout=CLOSE_S)

    def _work(self) -> None:
        with self.lane():
            # What jobs refer to must not live until the next one comes, so none is kept in a variable here.
            while take_step(self._take()):
                pass

    def _take(self) -> list[StepJob]:
        """Wait for a job; return it, and others that wait and obey the same order. Nothing: the end."""
        job = self._jobs.get()[2]
        jobs: list[StepJob] = [] if job is None else [job]
        values = sum(each.values for each in jobs)
        while jobs and values < self._most_values:
            try:
                entry = self._jobs.get_nowait()
            except queue.Empty:
                break
            job = entry[2]
            if job is None or job.order is not jobs[0].order or values + job.values > self._most_values:
                self._jobs.put(entry)
                break
            jobs.append(job)
            values += job.values
        return jobs


def take_step(jobs: Sequence[StepJob]) -> bool:
    """Step the chunks of jobs that obey one order in one call of the optimizer; return whether there were any."""
    if not jobs:
        return False
    first = jobs[0]
    try:
        if failpoints.ARMED:
            failpoints.hit("server.step")
        changes = [job.adder.begin(job) for job in jobs]
        first.adder.stepper.step([(one.total.chunk, one.mean) for job in jobs for one in job.ready], first.order)
        for job, its_changes in zip(jobs, changes, strict=True):
            job.adder.send(job, its_changes)
    except BaseException as error:
        first.ready[0].fail(error)
    return True


@dataclass(eq=False)
class _Total:
    """A sum on its way to become weights."""

    chunk: Chunk
    values: Any
    """What the adder made."""
    encoded: Encoded | None = None
    """The new weights."""


@dataclass(frozen=True)
class _Waiting:
    """A finished sum whose step has not been ordered."""

    total: _Total
    mean: Tensor
    then: Then
    fail: Fail


@dataclass(frozen=True, eq=False)
class StepJob:
    """Finished sums of one slot, and the order to step them."""

    adder: StepAdder
    ready: Sequence[_Waiting]
    version: int
    order: Any

    @property
    def chunks(self) -> list[Chunk]:
        """What is stepped."""
        return [waiting.total.chunk for waiting in self.ready]

    @property
    def values(self) -> int:
        """How many values that are."""
        return sum(chunk.length for chunk in self.chunks)


class StepAdder:
    """An :class:`~poseidon.sums.arithmetic.Adder` around another; also keeps what workers may fetch.

    Versions count the sums of this slot, from 1; the order for each is given once.
    """

    def __init__(
        self, inner: Adder, slot: Slot, rank: int, means: MeanMaker, stepper: Stepper, thread: StepThread
    ) -> None:
        self.layouts: Layouts = {**inner.layouts, **means.layouts}
        self.together = inner.together
        self._inner = inner
        self._slot = slot
        self._owned = [chunk for chunk in slot.chunks if chunk.owner == rank]
        self._means = means
        self.stepper = stepper
        self._thread = thread
        self._lock = threading.Lock()
        self._order: tuple[int, Any] | None = None
        self._summed = dict.fromkeys((chunk.index for chunk in self._owned), 0)
        """Version of each chunk's last finished sum..."""
        self._stepped = dict(self._summed)
        """... and of its weights; 0: as they were at first."""
        self._begun = dict(self._summed)
        """Version of the last step that has begun to change a chunk..."""
        self._earlier: dict[int, Tensor | None] = {}
        """... and its exact weights before: a slower worker may look at them between ``backward()`` and ``step()``."""
        self._kept: dict[int, Tensor] = {}
        """The mean of each chunk's last sum."""
        self._waiting: dict[int, _Waiting] = {}
        self._asks: list[tuple[Chunk, Ask, int, Reply, memoryview]] = []
        self._sent_rounded: set[int] = set()
        """Chunks whose weights were rounded the last time."""
        self._looked: dict[int, set[int]] = {}
        """Versions at which a chunk's exact weights were fetched."""
        self._all_summed: dict[int, Future[None]] = {}

    # What this worker's own user does.

    def order(self, version: int, order: Any) -> None:
        """Step every chunk of ``version``, now or when its sum is there."""
        with self._lock:
            self._order = (version, order)
            ready = [self._waiting.pop(index) for index in list(self._waiting)]
        if ready:
            # Together: a call of the optimizer costs more than a few chunks do.
            self._submit(ready, version, order)

    def when_summed(self, version: int) -> Future[None]:
        """Return a future for all chunks' sums."""
        future: Future[None] = Future()
        with self._lock:
            if all(summed >= version for summed in self._summed.values()):
                future.set_result(None)
            else:
                self._all_summed[version] = future
        return future

    def means(self) -> list[tuple[Chunk, Tensor]]:
        """Return the mean gradients of the last sum."""
        return [(chunk, self._kept[chunk.index]) for chunk in self._owned]

    # What other workers ask.

    def ask(self, chunk: Chunk, what: Ask, version: int, reply: Reply, details: memoryview) -> None:
        """Answer now, or when ``version`` is there."""
        with self._lock:
            have = (self._summed if what is Ask.MEAN else self._stepped)[chunk.index]
            if have < version:
                self._asks.append((chunk, what, version, reply, details))
                return
            # Between backward() and step() the asker may be one behind.
            is_kept = what is Ask.STATE or (what in _VALUES and self._earlier.get(chunk.index) is not None)
            if have > version + is_kept:
                raise ServerError(f"version {version} of {chunk} was asked for ({what.name}), but it has {have}")
        reply(self._answer(chunk, what, version, details))

    def _answer(self, chunk: Chunk, what: Ask, version: int, details: memoryview) -> Answer:
        if what is Ask.MEAN:
            return Answer(self._means.payload(chunk, self._kept[chunk.index]))
        # In the lane, since on the model's own stream this would wait for whatever the model waits for, such as a
        # collective that the asker has yet to join. Under the lock the next step cannot begin to change what is copied.
        with self._thread.lane(), self._lock:
            is_past = self._begun[chunk.index] > version
            if what is Ask.STATE:
                return Answer(memoryview(b""), is_past=True) if is_past else Answer(self.stepper.state_of(chunk))
            if what is Ask.ROWS:
                earlier = self._earlier[chunk.index] if is_past else None
                return Answer(self.stepper.rows_of(chunk, details, earlier))
            # Rounding saves nothing where somebody looks at the exact weights step after step.
            looked = self._looked.setdefault(chunk.index, set())
            looked.add(version)
            # Once the next sum is there, it may be too late for its weights.
            is_frequent = version - 1 in looked and self._summed[chunk.index] == version
            if is_frequent:
                self.stepper.stop_rounding(chunk)
            if not is_past:
                return Answer(self.stepper.exact(chunk), is_frequent)
            earlier = self._earlier[chunk.index]
            assert earlier is not None  # ask() has seen to that
            return Answer(bytes_of(earlier))

    def _answer_asks(self, chunk: Chunk, kinds: Sequence[Ask], version: int) -> None:
        with self._lock:
            mine = [each for each in self._asks if each[0] is chunk and each[1] in kinds and each[2] == version]
            self._asks = [each for each in self._asks if each not in mine]
        for _, what, _, reply, details in mine:
            reply(self._answer(chunk, what, version, details))

    # The adder.

    def open(self, values: Any, then: Then, fail: Fail) -> None:
        """Begin a step."""
        self._inner.open(values, then, fail)

    def part(self, chunk: Chunk) -> Encoded:
        """Return this worker's part."""
        return self._inner.part(chunk)

    def own(self, chunk: Chunk) -> Any:
        """Return this worker's part."""
        return self._inner.own(chunk)

    def place_part(self, chunk: Chunk, rank: int, length: int) -> memoryview | None:
        """Return where to receive a part."""
        return self._inner.place_part(chunk, rank, length)

    def decode(self, chunk: Chunk, encoding: int, payload: memoryview) -> Any:
        """Return a part that has been received."""
        if encoding in self._means.layouts:
            raise ServerError(f"a part of {chunk} came as a change ({Encoding(encoding).name}); only weights do")
        return self._inner.decode(chunk, encoding, payload)

    def touch(self, chunk: Chunk, everybody: Sequence[TouchedRows]) -> Any:
        """Return touched rows as a part."""
        return self._inner.touch(chunk, everybody)

    def add(self, chunk: Chunk, parts: Sequence[Any], total: _Total | None) -> _Total:
        """Add parts."""
        return _Total(chunk, self._inner.add(chunk, parts, None if total is None else total.values))

    def wait(self, total: _Total, then: Then, fail: Fail) -> None:
        """Call ``then`` once the chunk has been stepped."""
        self._inner.wait(total.values, lambda: self._take_sum(total, then, fail), fail)

    def encode(self, chunk: Chunk, total: _Total) -> Encoded:  # noqa: ARG002 - as in the contract
        """Return the new weights."""
        assert total.encoded is not None
        return total.encoded

    def place_sum(self, chunk: Chunk, length: int) -> memoryview:
        """Return where to receive weights: where this worker's part lay."""
        return self._inner.place_sum(chunk, length)

    def land(self, chunk: Chunk, encoding: int, payload: Payload) -> None:
        """Note that a chunk's weights are here."""
        self._inner.land(chunk, encoding, payload)

    def close(self) -> Any:
        """Leave the weights in the values, now or later."""
        return self._means.close()

    # Inside.

    def _take_sum(self, total: _Total, then: Then, fail: Fail) -> None:
        chunk = total.chunk
        mean = self._means.mean(chunk, total.values)
        waiting = _Waiting(total, mean, then, fail)
        with self._lock:
            version = self._summed[chunk.index] + 1
            self._summed[chunk.index] = version
            self._kept[chunk.index] = mean
            order = self._order if self._order is not None and self._order[0] == version else None
            if order is None:
                self._waiting[chunk.index] = waiting
            are_all = all(summed >= version for summed in self._summed.values())
            everybody = self._all_summed.pop(version, None) if are_all else None
        self._answer_asks(chunk, [Ask.MEAN], version)
        if everybody is not None:
            everybody.set_result(None)
        if order is not None:
            self._submit([waiting], *order)

    def _submit(self, ready: Sequence[_Waiting], version: int, order: Any) -> None:
        self._thread.put(self._slot.priority, StepJob(self, ready, version, order))

    def begin(self, job: StepJob) -> list[WeightChange | None]:
        """Prepare a step, on the thread that takes it; return what the new weights of each chunk change from."""
        is_change = self.stepper.changes(job.order)
        if is_change:
            earlier = {chunk.index: self.stepper.keep(chunk) for chunk in job.chunks}
            with self._lock:
                self._earlier.update(earlier)
                self._begun.update(dict.fromkeys(earlier, job.version))
        self.stepper.begin(job.chunks, job.order)
        return [self._change(chunk, job.version, is_change) for chunk in job.chunks]

    def send(self, job: StepJob, changes: Sequence[WeightChange | None]) -> None:
        """Let the new weights leave."""
        for waiting, change in zip(job.ready, changes, strict=True):
            chunk = waiting.total.chunk
            # What comes next need not wait until the device is done with this.
            send = partial(self._send, waiting, job.version)
            self._means.encode(chunk, self.stepper.outgoing(chunk), change, send, waiting.fail)

    def _send(self, waiting: _Waiting, version: int, encoded: Encoded) -> None:
        chunk = waiting.total.chunk
        waiting.total.encoded = encoded
        with self._lock:
            self._stepped[chunk.index] = version
        waiting.then()
        self._answer_asks(chunk, [*_VALUES, Ask.STATE], version)

    def _change(self, chunk: Chunk, version: int, is_change: bool) -> WeightChange | None:
        """Return what the next weights change from; None if they must travel as they are."""
        is_rounded = self.stepper.rounds(chunk)
        if not is_change and self._means.layouts:
            # Workers keep the weights that they have, whatever comes; no change takes the fewest bytes.
            return WeightChange(self.stepper.outgoing(chunk), is_rounded)
        # A worker that got rounded weights has no exact ones; but rounding those that it may have looked at is easy.
        is_known = is_rounded or chunk.index not in self._sent_rounded
        if is_rounded:
            self._sent_rounded.add(chunk.index)
        else:
            self._sent_rounded.discard(chunk.index)
        if not is_known or version % REFRESHED == 0 or not self._means.layouts:
            return None
        return WeightChange(self.stepper.outgoing(chunk), is_rounded)
