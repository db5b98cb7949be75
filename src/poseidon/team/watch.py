"""Who is alive: heartbeats in the job's store, read when a wait fails so that the error names the culprit."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from poseidon.errors import WorkerLostError
from poseidon.job import tell as report
from poseidon.job.closing import Stage, at_exit
from poseidon.team.membership import Membership

BEAT_S = 1.0
"""Seconds between two heartbeats; a worker silent for two and a half of them is considered dead."""

PHASES = ("starting", "in forward", "in backward", "at the end of backward", "finished backward")
"""What a worker may be doing in a step, in this order."""

EXIT_STATUS = 75
"""Exit status of a process that ends because another worker was lost; "try again" in the sysexits convention."""


class Store(Protocol):
    """The part of torch's key-value stores that is used here."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Read a key, waiting until it exists."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""


class Watch:
    """Writes this worker's heartbeat and explains why a wait failed.

    :meth:`note` may be called from any thread and costs two assignments. The threads end with :meth:`close`, which also
    runs at exit: a daemon thread inside the store's C++ code would otherwise crash the interpreter.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        membership: Membership,
        timeout_s: float,
        give_up: Callable[[WorkerLostError], None] | None = None,
    ) -> None:
        self.rank = rank
        self.membership = membership
        """Replaced when the workers have introduced themselves."""
        self.timeout_s = timeout_s
        self._store = store
        self._prefix = prefix
        self._step = 0
        self._doing = "starting"
        self._beats = 0
        self._give_up = give_up or _end_process
        self._guarded: collections.deque[tuple[float, Any, str]] = collections.deque()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._beat_until_closed)
        self._cancel_exit = at_exit(Stage.WATCHES, self.close)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names by rank."""
        return self.membership.hosts

    def note(self, step: int, doing: str) -> None:
        """Record what this worker is doing, one of :data:`PHASES`; shown to workers whose wait for it fails."""
        self._step, self._doing = step, doing

    def close(self) -> None:
        """Stop the heartbeat. Further calls do nothing."""
        self._cancel_exit()
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def guard(self, work: Any, what: str) -> None:
        """Enforce a deadline on an operation that the host does not wait for: NCCL's never end when a peer hangs.

        No exception could reach the stuck thread, so after the deadline the process prints why and exits.
        """
        if len(self._threads) == 1:
            self._start(self._guard_until_closed)
        self._guarded.append((time.monotonic(), work, what))

    def lost(self, what: str, peer: int | None, cause: BaseException) -> WorkerLostError:
        """Return the error for a wait that failed, naming the culprit as far as heartbeats show."""
        head = f"rank {self.rank} ({self.hosts[self.rank]}) gave up waiting at step {self._step} for {what}"
        if peer is not None:
            head += f" from rank {peer} ({self.hosts[peer]})"
        try:
            verdict = self._verdict(peer, cause)
        except Exception as error:
            verdict = (
                f"the job's store does not answer, so rank 0 ({self.hosts[0]}) is probably gone ({_first_line(error)})"
            )
        return WorkerLostError(f"{head}: {verdict}. The wait ended with: {_first_line(cause)}")

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="poseidon-watch", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard_until_closed(self) -> None:
        while not self._stop.wait(BEAT_S):
            while self._guarded and self._guarded[0][1].is_completed():
                self._guarded.popleft()
            if self._guarded and time.monotonic() - self._guarded[0][0] > self.timeout_s:
                _, _, what = self._guarded.popleft()
                self._give_up(self.lost(what, None, TimeoutError(f"not done after {self.timeout_s:g} s")))

    def _verdict(self, peer: int | None, cause: BaseException) -> str:
        if peer is not None and getattr(cause, "is_damaged", False):
            # Certain, whatever the heartbeats say.
            return f"rank {peer} ({self.hosts[peer]}) sent a damaged message"
        before = self._read()
        time.sleep(2.5 * BEAT_S)
        after = self._read()
        dead, alive = [], []
        for rank, host in enumerate(self.hosts):
            if rank == self.rank:
                continue
            beat = after.get(rank)
            if beat is None:
                dead.append(f"rank {rank} ({host}) never reported")
            elif beat == before.get(rank):
                dead.append(
                    f"rank {rank} ({host}) is dead or cut off; last seen at step {beat['step']}, {beat['doing']}"
                )
            else:
                text = f"rank {rank} ({host}) is alive, at step {beat['step']}, {beat['doing']}"
                alive.append((_progress(beat), rank, text))
        for _, rank, text in alive:
            # Whoever is dead may only have been the first to end because of it.
            if rank == peer and is_broken(cause):
                return f"{text}, but its connection with rank {self.rank} broke"
        if dead:
            return "; ".join(dead)
        last = min(progress for progress, _, _ in alive)
        behind = {rank: text for progress, rank, text in alive if progress == last}
        # Of several that are equally far behind, the one whose message is missing.
        found = behind[peer] if peer in behind else "; ".join(behind.values())
        return f"nobody is dead, but {found} (waited {self.timeout_s:g} s; timeout_s= changes that)"

    def _read(self) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in range(len(self.hosts)):
            key = f"{self._prefix}/{rank}"
            if self._store.check([key]):
                found[rank] = json.loads(self._store.get(key))
        return found

    def _beat_until_closed(self) -> None:
        while True:
            beat = {"beat": self._beats, "step": self._step, "doing": self._doing}
            report.tell(step=self._step, doing=self._doing)
            # The store may go away before this worker when the job ends; that is not this worker's error.
            with contextlib.suppress(Exception):
                self._store.set(f"{self._prefix}/{self.rank}", json.dumps(beat))
            self._beats += 1
            if self._stop.wait(BEAT_S):
                return


def is_broken(cause: BaseException) -> bool:
    """Return whether a wait ended because a connection did, and not because time was up."""
    return bool(getattr(cause, "is_broken", False))


def _progress(beat: dict[str, Any]) -> tuple[int, int]:
    return beat["step"], PHASES.index(beat["doing"])


def _end_process(error: WorkerLostError) -> None:
    print(f"poseidon: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_STATUS)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
