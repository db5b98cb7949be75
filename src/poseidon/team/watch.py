"""Who is alive: heartbeats over the team's mesh. They decide how long a wait goes on, and whom its error names."""

from __future__ import annotations

import collections
import itertools
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from poseidon.errors import WorkerLostError
from poseidon.job import settings
from poseidon.job import tell as report
from poseidon.job.closing import Stage, at_exit
from poseidon.job.elastic import this_job
from poseidon.observe.recorder import Recorder
from poseidon.observe.steps import BETWEEN, FORWARD, StepClock
from poseidon.team.life import BEAT_S, PHASES, SILENT_BEATS, Beat, Life
from poseidon.team.membership import Membership
from poseidon.team.pulse import Pulse, uncaught, waiting_call
from poseidon.wire.mesh import Mesh
from poseidon.wire.transport import LostHandler

__all__ = ["BEAT_S", "IS_WAITING", "PHASES", "Waiting", "Watch", "is_broken"]

_log = logging.getLogger(__name__)

_WAITING = "rank %d has waited for %s for %.0f s and goes on: %s"
IS_WAITING = re.compile(r"rank \d+ has waited for .+ s and goes on: ")
"""A line in which a worker says so: it is no progress."""

CLOSED, FINISHED, FAILED = "closed its model", "finished", "failed"
"""How a worker leaves."""

_noted: list[weakref.ref[Watch]] = []
"""The watch that was told last what this worker does. Only that one tells the launcher: if all did, in turn, the
launcher would take their different words for progress."""

_OPEN: weakref.WeakSet[Watch] = weakref.WeakSet()
_WAIT_NUMBERS = itertools.count(1)

_RECORDERS: list[Recorder] = []
"""This process's recorder, from its first watch on, if a launcher listens."""

_CLOCKS: list[StepClock] = []
"""This process's clock where it has no recorder, if somebody wants to know its waits."""

_PHASE_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}

_BEFORE = [0]
"""Steps that were complete when the workers of an elastic job last met: engines count anew then."""

_THREAD = threading.local()
"""Whether this thread is one of Poseidon's own."""


class Watch:
    """Sends this worker's heartbeat, hears the others', and explains why a wait failed.

    :meth:`note` may be called from any thread and costs a few assignments. The thread ends with :meth:`close`, which
    also runs at exit and tells the others that this worker leaves.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        membership: Membership,
        timeout_s: float,
        give_up: Callable[[WorkerLostError], None] | None = None,
    ) -> None:
        self.rank = rank
        self.membership = membership
        """Replaced when the workers have introduced themselves."""
        self.timeout_s = timeout_s
        self._mesh = mesh
        self._life = Life(rank, membership.size, timeout_s, time.monotonic())
        self._lock = threading.Lock()
        self._step = 0
        self._doing = PHASES[0]
        self._maker = threading.get_ident()
        self._pulse = Pulse()
        self._waits: dict[int, str] = {}
        self.recorder = _find_recorder(mesh)
        """Adds up where this worker's time goes; None where nobody listens."""
        self.clock = next(iter(_CLOCKS), None) if self.recorder is None else self.recorder.clock
        self._give_up = give_up or _end_process
        self._loss: WorkerLostError | None = None
        """The first wait that failed."""
        self._lost_handlers: list[LostHandler] = []
        self._broken: dict[int, str] = {}
        """Whose connection ended without a farewell, and why."""
        self._told: set[int] = set()
        self._guarded: collections.deque[tuple[float, Any, str]] = collections.deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_closed, name="poseidon-watch", daemon=True)
        self._thread.start()
        self._cancel_exit = at_exit(Stage.WATCHES, self._close_at_exit)
        _OPEN.add(self)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names by rank."""
        return self.membership.hosts

    @property
    def step(self) -> int:
        """The step this worker is in."""
        return self._step

    def note(self, step: int, doing: str, samples: int = 0) -> None:
        """Record what this worker is doing, one of :data:`PHASES`; shown to workers whose wait for it fails."""
        self._step, self._doing = step, doing
        if self.clock is not None:
            self.clock.mark(_PHASE_NUMBERS[doing], step + _BEFORE[0], time.monotonic(), samples)
        if not _noted or _noted[0]() is not self:
            _noted[:] = [weakref.ref(self)]

    def close(self, left: str = CLOSED, error: BaseException | None = None) -> None:
        """Tell the others how this worker leaves, and stop the heartbeat. Further calls do nothing."""
        if self._stop.is_set():
            return
        _OPEN.discard(self)
        self._cancel_exit()
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        last = self._beat()
        if not last.left:
            last = replace(last, left=left) if error is None else replace(last, left=FAILED, why=first_line(error))
        self._mesh.signal(last.pack())
        self._mesh.part()
        # The last beat may be a second old, or have come before the first step.
        self._tell_launcher()

    def guard(self, work: Any, what: str) -> None:
        """Enforce a limit on an operation that the host does not wait for: NCCL's never end when a peer hangs.

        No exception could reach the stuck thread, so when there is no hope the process prints why and exits.
        """
        self._guarded.append((time.monotonic(), work, what))

    def waiting(self, what: str, peer: int | None = None, members: Sequence[int] | None = None) -> Waiting:
        """Return a wait for what others send, to be used as a context; its ``look`` raises when there is no hope.

        With ``members``, ``look`` gets places in it instead of ranks.
        """
        return Waiting(self, what, peer, members)

    def lost(self, what: str, peer: int | None, cause: BaseException) -> WorkerLostError:
        """Return the error for a wait that failed, naming the culprit as far as heartbeats show."""
        head = f"rank {self.rank} ({self.hosts[self.rank]}) gave up waiting at step {self._step} for {what}"
        if peer is not None:
            head += f" from rank {peer} ({self.hosts[peer]})"
        error = WorkerLostError(f"{head}: {self._verdict(peer, cause)}. The wait ended with: {first_line(cause)}")
        if self._loss is None:
            self._loss = error
            # The others must know before this worker's connections end: they would take it for the cause.
            self._mesh.signal(self._beat().pack())
        return error

    def busy(self) -> str:
        """Return who is alive and outside of exchanges, in words."""
        with self._lock:
            return "; ".join(self._life.describe(rank, self.hosts) for rank in self._life.busy(time.monotonic()))

    def is_busy(self, rank: int) -> bool:
        """Return whether another worker is alive and works, as far as one can know."""
        self._hear()
        with self._lock:
            return rank != self.rank and self._life.is_busy(rank, time.monotonic())

    def listen_lost(self, handler: LostHandler) -> None:
        """Call ``handler`` when a worker's connection has ended without a farewell, or if one has already.

        For whoever exchanges nothing over the mesh, and would not notice: without heartbeats nobody can tell whether
        that worker lives. It is called on any thread, and must not wait.
        """
        with self._lock:
            self._lost_handlers.append(handler)
            broken = [(rank, self._broken[rank]) for rank in sorted(self._told)]
        for rank, why in broken:
            handler(rank, why)

    def lose(self, rank: int, why: str) -> None:
        """Note that another connection with a worker has ended without a farewell, and tell whoever listens."""
        with self._lock:
            self._broken.setdefault(rank, why)
        self._tell_lost()

    def look(self) -> None:
        """Read what has come, and tell whoever listens whose connections have broken: not only at the next beat."""
        self._hear()
        self._tell_lost()

    def _tell_lost(self) -> None:
        if len(self._broken) == len(self._told):
            return  # as at nearly every beat
        with self._lock:
            news = {rank: why for rank, why in self._broken.items() if rank not in self._told}
            self._told.update(news)
            handlers = list(self._lost_handlers)
        for rank, why in news.items():
            for handler in handlers:
                try:
                    handler(rank, why)
                except Exception:
                    # The heart must go on beating, and the others must hear of it all the same.
                    _log.exception("rank %d could not handle the loss of rank %d (%s)", self.rank, rank, why)

    def is_hopeless(self, peer: int | None, since: float) -> bool:
        """Return whether a wait for ``peer``, or for anybody, that began at ``since`` should end."""
        self._hear()
        with self._lock:
            return self._life.is_hopeless(self._beat(), peer, since, time.monotonic())

    def _verdict(self, peer: int | None, cause: BaseException) -> str:
        if peer is not None and getattr(cause, "is_damaged", False):
            # Certain, whatever the heartbeats say.
            return f"rank {peer} ({self.hosts[peer]}) sent a damaged message"
        self._hear()
        is_clear = isinstance(cause, HopelessError) or (peer is not None and self._life.has_finished(peer))
        # In an elastic job the launcher finds out, and the others wait for this worker.
        if not is_clear and this_job() is None:
            # What ended this connection may have ended others, and who is dead shows only by silence.
            time.sleep(SILENT_BEATS * BEAT_S)
            self._hear()
        with self._lock:
            return self._life.verdict(self._beat(), peer, is_broken(cause), self.hosts, time.monotonic())

    def _hear(self) -> None:
        heard = self._mesh.hear()
        now = time.monotonic()
        with self._lock:
            for rank, one in heard.items():
                beat = Beat.unpack(one.signal)
                self._life.hear(rank, beat, one.at, bool(one.ended), now)
                if one.ended and not beat.left:
                    self._broken.setdefault(rank, f"the connection of its heartbeats broke: {one.ended}")

    def _beat(self) -> Beat:
        waits_for, number = self._outer_wait()
        beat = Beat(self._step, self._doing, waits_for, number, self._pulse.work)
        error = self._loss or uncaught()
        return beat if error is None else replace(beat, left=FAILED, why=first_line(error))

    def _outer_wait(self) -> tuple[str, int]:
        for number, what in list(self._waits.items()):
            return what, number
        for since, _, what in list(self._guarded)[:1]:
            if time.monotonic() - since > BEAT_S:
                return what, int(since * 1e3)
        return self._inner_wait() or waiting_call(self._maker)

    def _inner_wait(self) -> tuple[str, int] | None:
        """Return a wait in another team of this worker, if all whom it can be for are in this one, too.

        Only then do this team's heartbeats show whether somebody will end it.
        """
        for other in elders(self.membership.members[self.rank].global_rank):
            for number, what in list(other._waits.items()) if other is not self else ():
                if self.membership.includes(other.membership):
                    return what, number
        return None

    def _beat_until_closed(self) -> None:
        while True:
            self._pulse.look()
            job = this_job()
            if job is not None and uncaught() is not None:
                job.resign()  # it cannot leave its step, and the others would wait until its process ends
            self._mesh.signal(self._beat().pack())
            self._tell_launcher()
            self.look()
            self._check_guarded()
            if self._stop.wait(BEAT_S):
                return

    def _tell_launcher(self) -> None:
        if not _noted or _noted[0]() in (None, self):
            report.tell(step=self._step + _BEFORE[0], doing=self._doing)

    def _check_guarded(self) -> None:
        while self._guarded and self._guarded[0][1].is_completed():
            self._guarded.popleft()
        if self._guarded and self.is_hopeless(None, self._guarded[0][0]):
            since, _, what = self._guarded.popleft()
            self._give_up(self.lost(what, None, HopelessError(time.monotonic() - since)))

    def _close_at_exit(self) -> None:
        self.close(FINISHED, getattr(sys, "last_value", None))


class Waiting:
    """One wait of this worker for others. While it lasts, the others see in the heartbeat what it is for."""

    def __init__(self, watch: Watch, what: str, peer: int | None, members: Sequence[int] | None) -> None:
        self._watch = watch
        self._what = what
        self._peer = peer
        self._members = members
        self._since = time.monotonic()
        self._next_look = self._since + BEAT_S
        self._warns_at = self._since + watch.timeout_s
        self._number = 0

    def __enter__(self) -> Waiting:
        # Poseidon's own threads wait while the worker computes.
        if not is_own_thread():
            self._number = next(_WAIT_NUMBERS)
            self._watch._waits[self._number] = self._what
        return self

    def __exit__(self, *_: object) -> None:
        self._watch._waits.pop(self._number, None)

    def look(self, peer: int | None = None) -> None:
        """Raise :class:`WorkerLostError` if nothing can come any more, from ``peer`` or from anybody."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + BEAT_S
        if peer is None:
            peer = self._peer
        elif self._members is not None:
            peer = self._members[peer]
        if self._watch.is_hopeless(peer, self._since):
            raise self._watch.lost(self._what, peer, HopelessError(now - self._since))
        if now > self._warns_at:
            self._warns_at = float("inf")
            _log.warning(_WAITING, self._watch.rank, self._what, now - self._since, self._watch.busy())


def is_own_thread() -> bool:
    """Return whether this thread is one of Poseidon's own."""
    try:
        return bool(_THREAD.is_own)
    except AttributeError:
        _THREAD.is_own = threading.current_thread().name.startswith("poseidon-")
        return bool(_THREAD.is_own)


class HopelessError(TimeoutError):
    """A wait was given up because of what the heartbeats say."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(f"no answer within {waited_s:.0f} s")


def elders(global_rank: int) -> list[Watch]:
    """Return the open watches of this worker, which has this rank in the whole job."""
    return [one for one in list(_OPEN) if one.membership.members[one.rank].global_rank == global_rank]


def is_broken(cause: BaseException) -> bool:
    """Return whether a wait ended because a connection did, and not because time was up."""
    return bool(getattr(cause, "is_broken", False))


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def keep_clock() -> StepClock:
    """Return the clock that adds up this process's waits for others; makes one where nobody else listens."""
    if _RECORDERS:
        return _RECORDERS[0].clock
    if not _CLOCKS:
        _CLOCKS.append(StepClock(time.monotonic()))
        for watch in list(_OPEN):
            watch.clock = watch.clock or _CLOCKS[0]
    return _CLOCKS[0]


def number_steps_from(done: int) -> None:
    """Note how many steps are complete as the workers of an elastic job begin, or go on."""
    _BEFORE[0] = done


def count_alone(done: int) -> None:
    """Note that a worker whom the others have left has completed its step of this number: no engine says so."""
    for recorder in _RECORDERS:
        now = time.monotonic()
        recorder.clock.mark(BETWEEN, done - 1, now)
        recorder.clock.mark(FORWARD, done, now)
        report.tell(step=done, doing=PHASES[FORWARD])


def _find_recorder(mesh: Mesh) -> Recorder | None:
    if not settings.REPORT.read():
        return None
    if not _RECORDERS:
        _RECORDERS.append(Recorder(report.tell))
        at_exit(Stage.WATCHES, _RECORDERS[0].close)
        steps = settings.TRACE.read()
        if steps is not None:
            _RECORDERS[0].trace(*steps)
    _RECORDERS[0].ip = mesh.address[0]
    return _RECORDERS[0]


def _end_process(error: WorkerLostError) -> None:
    print(f"poseidon: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_status)
