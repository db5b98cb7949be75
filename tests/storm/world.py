"""A world on virtual time: many threads of which exactly one runs, in an order that a seed decides.

Every simulated thread is a real one, but it runs only while it holds the baton. It passes the baton on where real code
would wait, and now and then elsewhere, so that other threads and faults come between any two of its operations. When
nobody can run, the clock jumps to the next moment at which something happens; so a wait of an hour costs nothing, and a
world in which nothing will ever happen again is a hang.

Threads belong to processes. A process can be paused, and killed: then its threads never run again.
"""

from __future__ import annotations

import _thread
import heapq
import random
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

BUSY_S = 30e-6
"""How long a thread is busy, on average, where it is interrupted."""
MOST_MOVES = 2_000_000
"""More than any healthy job makes: a thread that only looks at the clock would never let it advance."""

_STAMP = struct.Struct("<di")


class Killed(BaseException):
    """Ends a thread whose process was killed, or whose world is over."""


class WorldError(Exception):
    """The simulation cannot go on: what it simulates hangs, or spins."""


class Process:
    """What lives and dies together: the threads and connections of one worker, at an address of its own."""

    def __init__(self, world: World, name: str, ip: str) -> None:
        self.world = world
        self.name = name
        self.ip = ip
        self.is_dead = False
        self.is_paused = False
        self.held: list[Task] = []
        """Threads that could run if the process were not paused."""
        self.on_death: list[Callable[[], None]] = []
        """What the kernel does when the process is gone."""

    def pause(self) -> None:
        """Stop the threads of this process, as SIGSTOP does."""
        self.is_paused = True
        ready, self.world.ready = self.world.ready, []
        for task in ready:
            (self.held if task.process is self else self.world.ready).append(task)

    def resume(self) -> None:
        """Let the threads run again."""
        self.is_paused = False
        held, self.held = self.held, []
        self.world.ready += held

    def kill(self) -> None:
        """End this process; the kernel closes its connections."""
        if not self.is_dead:
            self.is_dead = True
            self.world.ready = [task for task in self.world.ready if task.process is not self]
            for act in self.on_death:
                act()
            self.world.wake_root()


class Task:
    """One simulated thread."""

    def __init__(self, world: World, number: int, name: str, process: Process) -> None:
        self.world = world
        self.number = number
        self.name = name
        self.process = process
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.is_done = False
        self.is_blocked = False
        self.ticket = 0
        """Counts the waits, so that an old alarm does not end a new one."""
        self.timed_out = False
        self.waiters: list[Wait] = []
        """Threads that wait for this one's end."""
        self.thread: threading.Thread | None = None
        self.handle: Any = None
        """The stand-in for ``threading.Thread`` that code sees."""


Wait = tuple[Task, int]
"""One wait of a thread."""


class World:
    """All processes of one simulation; use it as a context manager, one at a time."""

    current: World | None = None

    def __init__(self, seed: int, chatter: float = 0.08, keep_trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        """Seconds on the virtual clock."""
        self.digest = 0
        """Of everything that happened, in order: equal if and only if two runs were the same."""
        self.moves = 0
        self.ready: list[Task] = []
        self.tasks: list[Task] = []
        self.trace: list[str] = []
        self.problem: str | None = None
        """Why the simulation could not go on."""
        self.crashes: list[tuple[str, str, BaseException]] = []
        """Threads that an exception ended: process, name and error."""
        self._keep_trace = keep_trace
        self._chatter = chatter
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._at_move: list[tuple[int, int, Callable[[], None]]] = []
        self.is_over = False
        self.root = Process(self, "root", "0.0.0.0")
        self.running = Task(self, 0, "root", self.root)
        self._root_task = self.running
        self.processes: list[Process] = []
        self.network: Any = None
        self.store: Any = None

    def __enter__(self) -> World:
        assert World.current is None, "one world at a time"
        World.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._unwind()
        World.current = None

    # What happens when.

    def process(self, name: str, ip: str) -> Process:
        """Return a new process."""
        made = Process(self, name, ip)
        self.processes.append(made)
        return made

    def spawn(self, process: Process, name: str, function: Callable[[], object], handle: Any = None) -> Task:
        """Start a thread; it runs when it is chosen."""
        task = Task(self, len(self.tasks) + 1, name, process)
        task.handle = handle
        self.tasks.append(task)
        task.thread = threading.Thread(target=self._live, args=(task, function), name=f"storm-{name}", daemon=True)
        task.thread.start()
        task.is_blocked = True
        self._let_run(task)
        return task

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Call ``act`` at a time; it must not block."""
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, act))

    def at_move(self, number: int, act: Callable[[], None]) -> None:
        """Call ``act`` when this many moves have been made, wherever everybody is then; it must not block."""
        self._timer_count += 1
        heapq.heappush(self._at_move, (number, self._timer_count, act))

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.digest = zlib.crc32(text.encode(), self.digest)
        if self._keep_trace:
            where = f"{self.running.process.name:>8} {self.running.name:<22}"
            self.trace.append(f"{self.now - 1000:12.6f} {where} {text[:2000]}")

    def run(self, tasks: Sequence[Task], limit_s: float) -> bool:
        """Let the others run until these threads have ended; return False after ``limit_s`` of virtual time or a hang.

        Called outside the simulated threads.
        """
        deadline = self.now + limit_s
        while not all(task.is_done or task.process.is_dead for task in tasks):
            if self.now >= deadline:
                self.problem = self.problem or f"a hang: no end after {limit_s:g} s"
            if self.problem is not None:
                return False
            self.block(deadline)
        return True

    # What a thread does; only the running one may call these.

    def point(self) -> None:
        """Let others come between, perhaps. Every operation that others can see begins with it."""
        if self.is_over or self.running.process.is_dead:
            raise Killed
        self.moves += 1
        if self._at_move and self._at_move[0][0] <= self.moves:
            heapq.heappop(self._at_move)[2]()
            if self.running.process.is_dead or self.running.process.is_paused:
                self.sleep(0.0)
        if self.moves > MOST_MOVES:
            self._stop(f"no end after {MOST_MOVES} moves; {self.running.name} of {self.running.process.name} runs")
        if self.random.random() < self._chatter:
            self.sleep(self.random.expovariate(1 / BUSY_S))

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.block(self.now + max(0.0, seconds), is_sleep=True)

    def block(self, deadline: float | None = None, is_sleep: bool = False) -> bool:
        """Wait until somebody calls :meth:`wake`; return False if ``deadline`` came first."""
        me = self.running
        if self.is_over or me.process.is_dead:
            raise Killed
        me.ticket += 1
        me.timed_out = False
        me.is_blocked = True
        if deadline is not None:
            ticket = me.ticket
            self.at(deadline, lambda: self._expire(me, ticket))
        other = self._choose()
        if other is not me:
            self._pass_to(other)
            me.baton.acquire()
        if self.is_over or me.process.is_dead:
            raise Killed
        return is_sleep or not me.timed_out

    def next_wait(self) -> Wait:
        """Return the wait that the running thread is about to begin, for whoever shall end it."""
        return self.running, self.running.ticket + 1

    def wake(self, wait: Wait) -> None:
        """End a wait; one that is over already stays over, and the thread's later ones go on."""
        task, ticket = wait
        if task.ticket == ticket:
            self._let_run(task)

    def _let_run(self, task: Task) -> None:
        if not task.is_blocked or task.process.is_dead:
            return
        task.is_blocked = False
        if task.process.is_paused:
            task.process.held.append(task)
        else:
            self.ready.append(task)

    def wake_root(self) -> None:
        """Let whoever runs the world look whether it is done."""
        self._let_run(self._root_task)

    # Passing the baton.

    def _live(self, task: Task, function: Callable[[], object]) -> None:
        task.baton.acquire()
        try:
            if not self.is_over and not task.process.is_dead:
                function()
        except Killed:
            pass
        except BaseException as error:
            self.note(f"ended by {type(error).__name__}: {error}")
            if not self.is_over:
                self.crashes.append((task.process.name, task.name, error))
        finally:
            task.is_done = True
            if self.is_over:
                self._pass_to(self._root_task)
            else:
                for waiter in task.waiters:
                    self.wake(waiter)
                self.wake_root()
                self._pass_to(self._choose())

    def _expire(self, task: Task, ticket: int) -> None:
        if task.is_blocked and task.ticket == ticket:
            task.timed_out = True
            self._let_run(task)

    def _choose(self) -> Task:
        """Return who runs next; the clock advances when nobody can."""
        while not self.ready:
            if not self._timers:
                self.problem = self.problem or "a hang: everybody waits, and nothing will ever happen"
                self._root_task.is_blocked = False
                return self._root_task
            when, _, act = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            act()
        place = self.random.randrange(len(self.ready)) if len(self.ready) > 1 else 0
        self.ready[place], self.ready[-1] = self.ready[-1], self.ready[place]
        return self.ready.pop()

    def _pass_to(self, task: Task) -> None:
        self.running = task
        self.digest = zlib.crc32(_STAMP.pack(self.now, task.number), self.digest)
        task.baton.release()

    def _stop(self, problem: str) -> None:
        self.problem = self.problem or problem
        self._let_run(self._root_task)
        self.block()

    def _unwind(self) -> None:
        """End all threads, one after the other."""
        self.is_over = True
        for task in self.tasks:
            if not task.is_done:
                self.running = task
                task.baton.release()
                self._root_task.baton.acquire()
            assert task.thread is not None
            task.thread.join()
        self.running = self._root_task


def here() -> World:
    """Return the world of the calling thread."""
    assert World.current is not None, "outside any simulated world"
    return World.current
