"""Make batches in the background, by as many threads as there are cores, so that a net finds its next batch ready.

Threads take the parts of a batch in order, one reading while the others decode and transform, and hand batches over in
order: results do not depend on their number.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from poseidon.caffe import device
from poseidon.errors import ConfigError
from poseidon.job import settings
from poseidon.job.world import World

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Part = Callable[[], None]

_PATIENCE_S = 10.0
"""How long the end of a prefetcher waits for threads inside a read that does not return."""


class Assembly(Protocol[T_co]):
    """A batch in the making."""

    def parts(self) -> Iterator[Part]:
        """Yield the work to do. One thread at a time asks for it, which is where to read; it is done by any thread."""
        ...

    def finish(self) -> T_co:
        """Return the result when all parts are done."""
        ...


@dataclass
class _Slot(Generic[T]):
    """A batch between its first part and the caller."""

    assembly: Assembly[T]
    parts: Iterator[Part] = field(init=False)
    taken: int = 0
    pending: int = 0
    is_read: bool = False
    results: list[T] = field(default_factory=list)
    failure: tuple[int, BaseException] | None = None
    """The first part that failed, and how."""

    def __post_init__(self) -> None:
        self.parts = self.assembly.parts()

    @property
    def is_complete(self) -> bool:
        return bool(self.results) or (self.failure is not None and not self.pending)


class _Line(Generic[T]):
    """What the threads of a prefetcher share; it does not refer to the prefetcher."""

    def __init__(self, assemblies: Iterator[Assembly[T]], limit: int) -> None:
        self.changed = threading.Condition()
        self.slots: deque[_Slot[T]] = deque()
        self.is_ended = False
        self._reading = threading.Lock()
        self._assemblies = assemblies
        self._limit = limit
        self._current: _Slot[T] | None = None

    def work(self) -> None:
        """Do parts until there are no more, or nobody wants them."""
        while (taken := self._take()) is not None:
            slot, number, part = taken
            try:
                part()
            except BaseException as error:  # handed to the thread that waits for the batch
                self._fail(slot, number, error)
            self._leave(slot)

    def stop(self) -> None:
        """Let the threads end after what they are doing."""
        with self.changed:
            self.is_ended = True
            self.changed.notify_all()

    def _take(self) -> tuple[_Slot[T], int, Part] | None:
        with self._reading:
            while not self.is_ended:
                slot = self._current or self._begin()
                if slot is None:
                    break
                try:
                    part = next(slot.parts, None)
                except BaseException as error:
                    self._fail(slot, slot.taken + 1, error)
                    break
                if part is not None:
                    with self.changed:
                        slot.taken += 1
                        slot.pending += 1
                    return slot, slot.taken, part
                self._current = None
                with self.changed:
                    slot.is_read = True
                    slot.pending += 1
                self._leave(slot)
            return None

    def _begin(self) -> _Slot[T] | None:
        """Start the next batch as soon as there is room for it."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_ended or len(self.slots) < self._limit)
            if self.is_ended:
                return None
        try:
            slot = _Slot(next(self._assemblies))
        except StopIteration:
            self.stop()
            return None
        except BaseException as error:
            slot = _Slot(_Nothing())
            self._fail(slot, 0, error)
        with self.changed:
            self.slots.append(slot)
            self._current = slot
            self.changed.notify_all()
        return slot

    def _leave(self, slot: _Slot[T]) -> None:
        with self.changed:
            slot.pending -= 1
            is_last = slot.is_read and not slot.pending and slot.failure is None
        if is_last:
            try:
                result = slot.assembly.finish()
            except BaseException as error:
                self._fail(slot, slot.taken + 1, error)
            else:
                slot.results.append(result)
        with self.changed:
            self.changed.notify_all()

    def _fail(self, slot: _Slot[T], number: int, error: BaseException) -> None:
        with self.changed:
            if slot.failure is None or number < slot.failure[0]:
                slot.failure = (number, error)
            self.is_ended = True
            self.changed.notify_all()


class _Nothing:
    """Stands for a batch that could not be started."""

    def parts(self) -> Iterator[Part]:
        return iter(())

    def finish(self) -> T:  # type: ignore[type-var]  # never called
        raise AssertionError("a batch that was not started has no result")


class Prefetcher(Generic[T]):
    """Makes batches up to ``depth`` ahead, in order; the threads start with the first request.

    An error is raised in the caller that requests the batch concerned, and again by every later request. The threads
    end when the prefetcher is freed, so ``assemblies`` must not refer to its owner.
    """

    def __init__(self, assemblies: Iterator[Assembly[T]], depth: int, name: str, threads: int | None = None) -> None:
        self._line = _Line(assemblies, max(1, depth))
        self._threads = [
            threading.Thread(target=self._line.work, name=f"prefetch {name}", daemon=True)
            for _ in range(threads or thread_count())
        ]
        self._process = 0
        """The one whose threads make the batches; 0: none yet."""
        weakref.finalize(self, _shut_down, self._line, self._threads)

    def __next__(self) -> T:
        """Return the next batch, waiting for it if necessary."""
        if not self._process:
            self._process = os.getpid()
            for thread in self._threads:
                thread.start()
        if self._process != os.getpid():
            # Threads do not come along, and the wait would be endless.
            raise ConfigError("this net has read data in the process that this one was forked from; build another here")
        line = self._line
        with line.changed:
            line.changed.wait_for(lambda: line.slots[0].is_complete if line.slots else line.is_ended)
            if not line.slots:
                raise StopIteration
            if line.slots[0].failure is not None:
                raise line.slots[0].failure[1]
            slot = line.slots.popleft()
            line.changed.notify_all()
        return slot.results[0]


def _shut_down(line: _Line[T], threads: list[threading.Thread]) -> None:
    line.stop()
    until = time.monotonic() + _PATIENCE_S
    for thread in threads:
        if thread.ident and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


def thread_count() -> int:
    """Return how many threads prepare batches: this worker's share of the machine's cores."""
    given = settings.INPUT_THREADS.read()
    if given is not None:
        return given
    try:
        sharing = World.from_environment().local_size or 1
    except ConfigError:
        # Of an environment that does not say where the workers meet: theirs may have met otherwise.
        sharing = 1
    return max(1, len(os.sched_getaffinity(0)) // sharing)


@dataclass(frozen=True)
class StagedBatch:
    """The tops of a data layer for one pass, on their way to the device."""

    tensors: tuple[torch.Tensor, ...]
    arrived: torch.cuda.Event | None = None
    """Marks the end of the background copy to a GPU; None without one."""

    def take(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors for use on the current stream."""
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.tensors[0].device)
            stream.wait_event(self.arrived)
            for tensor in self.tensors:
                tensor.record_stream(stream)
        return self.tensors


@dataclass(frozen=True)
class _Staging:
    """A batch that is copied to the active device when it is complete."""

    assembly: Assembly[tuple[torch.Tensor, ...]]
    streams: dict[torch.device, torch.cuda.Stream]
    """The streams for such copies, one for each GPU."""

    def parts(self) -> Iterator[Part]:
        return self.assembly.parts()

    def finish(self) -> StagedBatch:
        tensors, target = self.assembly.finish(), device.active()
        if target.type != "cuda":
            return StagedBatch(tensors)
        stream = self.streams.setdefault(target, torch.cuda.Stream(target))
        with torch.cuda.stream(stream):
            moved = tuple(tensor.pin_memory().to(target, non_blocking=True) for tensor in tensors)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        return StagedBatch(moved, arrived)


def staged(batches: Iterator[Assembly[tuple[torch.Tensor, ...]]]) -> Iterator[Assembly[StagedBatch]]:
    """Start copying each batch to the active device as soon as it is complete."""
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for assembly in batches:
        yield _Staging(assembly, streams)
