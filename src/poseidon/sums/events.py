"""What a device will have done, and a thread that waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from poseidon.team.team import CLOSE_S


class Done(Protocol):
    """Something a device will have done."""

    def synchronize(self) -> None:
        """Wait for it."""


class Waiter:
    """A thread that waits for one thing after the other, and then does what follows from it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Done, Callable[[], None], Callable[[BaseException], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, done: Done, then: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        """Call ``then`` once ``done`` is, and ``fail`` if either raises."""
        self._jobs.put((done, then, fail))

    def close(self) -> None:
        """End the thread after everything it was given."""
        self._jobs.put(None)
        self._thread.join(timeout=CLOSE_S)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            done, then, fail = job
            try:
                done.synchronize()
                then()
            except BaseException as error:
                fail(error)
            # What they hold need not stay until the next one comes.
            del job, done, then, fail


def record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event behind all work of ``stream``. Waiting for it does not spin: the network needs the cores."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
