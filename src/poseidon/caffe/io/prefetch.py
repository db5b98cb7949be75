"""Load batches in the background, so that a net finds its next batch ready."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from poseidon.caffe import device

T = TypeVar("T")

_END = object()


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class Prefetcher(Generic[T]):
    """Runs an iterator in its own thread, up to ``depth`` items ahead; the thread starts with the first item.

    An error of the iterator is raised in the caller that requests the next item. The thread ends when the prefetcher is
    freed, so the iterator must not refer to its owner.
    """

    def __init__(self, items: Iterator[T], depth: int, name: str) -> None:
        self._ready: queue.Queue[object] = queue.Queue(max(1, depth))
        stop = threading.Event()
        self._thread = threading.Thread(
            target=_fill, args=(items, self._ready, stop), name=f"prefetch {name}", daemon=True
        )
        weakref.finalize(self, _shut_down, self._ready, stop, self._thread)

    def __next__(self) -> T:
        """Return the next item, waiting for it if necessary."""
        if not self._thread.ident:
            self._thread.start()
        item = self._ready.get()
        if item is _END or isinstance(item, _Failure):
            self._ready.put(item)  # the next call gets the same answer
            if isinstance(item, _Failure):
                raise item.error
            raise StopIteration
        return item  # type: ignore[return-value]


def _fill(items: Iterator[T], ready: queue.Queue[object], stop: threading.Event) -> None:
    try:
        for item in items:
            ready.put(item)
            if stop.is_set():
                return
        ready.put(_END)
    except BaseException as error:  # handed to the thread that waits for the item
        ready.put(_Failure(error))


def _shut_down(ready: queue.Queue[object], stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is threading.current_thread() or not thread.ident:
        return
    # The thread may be blocked on a full queue: drain it until the thread has seen the event.
    while thread.is_alive():
        try:
            ready.get(timeout=0.01)
        except queue.Empty:
            thread.join(0.01)


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


def staged(batches: Iterator[tuple[torch.Tensor, ...]]) -> Iterator[StagedBatch]:
    """Start copying each batch to the active device; runs in the prefetching thread."""
    stream: torch.cuda.Stream | None = None
    for tensors in batches:
        target = device.active()
        if target.type != "cuda":
            yield StagedBatch(tensors)
            continue
        if stream is None or stream.device != target:
            stream = torch.cuda.Stream(target)
        with torch.cuda.stream(stream):
            moved = tuple(tensor.pin_memory().to(target, non_blocking=True) for tensor in tensors)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        yield StagedBatch(moved, arrived)
