"""An elastic job as one of its workers sees it: its seat in the present epoch, and when that epoch is over.

The launcher knows who is alive. When that changes it says so to every worker, over a pipe from the machine's agent.
Each worker cuts all its connections, so that whatever waits for others ends, and tells the launcher that it is ready.
Once all are, the launcher deals new seats: the next epoch. What a worker tells travels with its heartbeat and is told
again until it is answered.
"""

from __future__ import annotations

import functools
import json
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from poseidon.job import settings, tell
from poseidon.job.cutting import TORCH

BEAT_S = 0.5
"""Seconds between two heartbeats to the launcher."""
CUT_S = 0.1
"""While an epoch is over and its connections may still be used, they are cut again so often."""
NEWS_S = 10.0
"""How long to wait for the launcher to say that an epoch is over, when a collective of torch's has failed."""
NEVER = -1
"""The epoch of a worker that has not been in any."""


@dataclass(frozen=True)
class Seat:
    """A worker's place in one epoch, and where the workers of it meet."""

    epoch: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    @property
    def variables(self) -> dict[str, str]:
        """The seat as torchrun's variables."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class ElasticJob:
    """The line of this worker to the launcher of its elastic job."""

    def __init__(self, pipe: int, address: str, most: int, is_late: bool) -> None:
        self.most = most
        """The largest number of workers that the job may have."""
        self.is_late = is_late
        """Whether this worker came when the job was under way: it gets a seat only once it has built its objects."""
        self.seat: Seat | None = None
        self.listener: socket.socket | None = None
        """Where the others meet this worker if it becomes the first of the next epoch."""
        self.address = address
        """Where the others reach this worker."""
        self.door = 0
        """The port where workers that are about to join get the state; 0: nowhere."""
        self._pipe = pipe
        self._epoch = NEVER
        self._is_over = False
        self._is_apart = False
        """Whether it has left an epoch and has not sat down in another one."""
        self._is_wanted = False
        self._is_waiting = False
        self._port = 0
        self._next: Seat | None = None
        self._is_next_wanted, self._is_next_over = False, False
        """What was said of the epoch of the first seat before this worker has sat down."""
        self._has_resigned = False
        self._is_asking = False
        self._doors: list[tuple[str, int]] | None = None
        self._changed = threading.Condition()
        self._cutters: dict[Callable[[], None], None] = {TORCH.cut: None}
        self._waking, self._wake = os.pipe()
        threading.Thread(target=self._listen, name="poseidon-elastic", daemon=True).start()

    def at_end_of_epoch(self, cut: Callable[[], None]) -> None:
        """Call ``cut`` on another thread, maybe several times, when an epoch is over."""
        self._cutters[cut] = None

    @property
    def is_over(self) -> bool:
        """Whether the present epoch has ended: its workers must meet anew."""
        return self._is_over

    @property
    def is_wanted(self) -> bool:
        """Whether others wait to join, and the epoch should end with the step under way."""
        return self._is_wanted

    def wait_for_end(self, limit_s: float) -> bool:
        """Wait until the epoch is over, at most for so long; return whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, limit_s)
            return self._is_over

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        """Wait until something is true, as it may be when the epoch is over or after :meth:`look_again`."""
        with self._changed:
            self._changed.wait_for(is_true)

    def look_again(self) -> None:
        """Let :meth:`wait_for` look again, on whatever thread it waits."""
        with self._changed:
            self._changed.notify_all()

    def leave(self) -> None:
        """End this epoch, for the others too: cut all connections."""
        with self._changed:
            self._is_over = self._is_apart = True
            self._changed.notify_all()
            os.write(self._wake, b"l")
        self._cut()

    def resign(self) -> None:
        """Say that this worker takes part no more, so that nobody waits until its process has ended."""
        with self._changed:
            self._has_resigned = True
            os.write(self._wake, b"r")

    def ask_for_doors(self, limit_s: float) -> list[tuple[str, int]]:
        """Return where this worker, which is about to join, gets the others' state; nothing if nobody says so."""
        with self._changed:
            self._is_asking, self._doors = True, None
            os.write(self._wake, b"d")
            self._changed.wait_for(lambda: self._doors is not None, limit_s)
            self._is_asking = False
            return self._doors or []

    def arrive(self, look: Callable[[], None] = lambda: None) -> Seat:
        """Wait for the launcher to deal seats for the next epoch, and return this worker's.

        ``look`` is called now and then meanwhile, and may raise.
        """
        if self.listener is not None:
            self.listener.close()
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self.listener = socket.create_server((self.address, 0), family=family, backlog=1024)
        with self._changed:
            self._is_waiting, self._port = True, self.listener.getsockname()[1]
            os.write(self._wake, b"w")
            while not self._changed.wait_for(lambda: self._next is not None, BEAT_S):
                look()
            assert self._next is not None
            seat, self._next = self._next, None
            self._is_waiting = False
            TORCH.forget()
            self.seat, self._epoch = seat, seat.epoch
            self._is_wanted, self._is_over = self._is_next_wanted, self._is_next_over
            self._is_next_wanted = self._is_next_over = self._is_apart = False
        if seat.rank != 0:
            self.listener.close()
            self.listener = None
        os.environ.update(seat.variables)
        return seat

    # On the thread of this object.

    def _listen(self) -> None:
        pending = b""
        while True:
            self._beat()
            is_cutting = self._is_over and not self._is_waiting
            ready, _, _ = select.select([self._pipe, self._waking], [], [], CUT_S if is_cutting else BEAT_S)
            if self._waking in ready:
                os.read(self._waking, 1024)
            if self._pipe in ready:
                data = os.read(self._pipe, 1 << 16)
                if not data:
                    return  # the agent is gone, and ends this process
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line))
            with self._changed:  # so that the next epoch cannot begin meanwhile
                if self._is_over and not self._is_waiting:
                    self._cut()

    def _hear(self, news: dict[str, Any]) -> None:
        with self._changed:
            if "over" in news:
                if self._next is not None and news["over"] == self._next.epoch:
                    # Over before this worker has sat down.
                    if self.seat is None:
                        # It does so all the same: in a later epoch others may be further in the program.
                        self._is_next_wanted, self._is_next_over = True, self._is_next_over or not news["is_soft"]
                    else:
                        self._epoch, self._next = self._next.epoch, None
                if news["over"] == self._epoch:
                    self._is_wanted, self._is_over = True, self._is_over or not news["is_soft"]
            elif "doors" in news:
                self._doors = [(str(address), int(port)) for address, port in news["doors"]]
            elif self._is_waiting and news["seat"]["epoch"] > self._epoch:
                self._next = Seat(**news["seat"])
            self._changed.notify_all()

    def _beat(self) -> None:
        with self._changed:
            is_ready = self._is_waiting and self._next is None
            facts: dict[str, int] = {"epoch": self._epoch, "port": self._port if is_ready else 0}
            facts |= {
                "leaves": int(self._has_resigned),
                "apart": int(self._is_apart),
                "door": self.door,
                "asks": int(self._is_asking and self._doors is None),
            }
        tell.tell(elastic=facts)

    def _cut(self) -> None:
        for cut in list(self._cutters):
            cut()


def epoch_is_over() -> bool:
    """Return whether this process is a worker of an elastic job whose present epoch has ended."""
    job = this_job()
    return job is not None and job.is_over


@functools.cache
def this_job() -> ElasticJob | None:
    """Return the elastic job that this process is a worker of, if it is."""
    text = settings.ELASTIC.read()
    if not text:
        return None
    facts = json.loads(text)
    pipe = int(facts["pipe"])
    # A child of a worker inherits the variable but not the pipe.
    try:
        if tell.name_pipe(pipe) != f"{pipe}:{facts['inode']}":
            return None
    except OSError:
        return None
    return ElasticJob(pipe, str(facts["address"]), int(facts["most"]), bool(facts["is_late"]))
