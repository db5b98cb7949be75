"""Stand-ins for ``threading``, ``queue``, ``time`` and ``secrets`` in a simulated world.

They have what Poseidon uses. Anything else raises ``AttributeError``, so that new code is either simulated or noticed.
"""

from __future__ import annotations

import heapq
import queue as real_queue
import secrets as real_secrets
import threading as real_threading
import time as real_time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as RealFuture
from types import ModuleType
from typing import Any

from storm.world import Task, Wait, World, here


class Lock:
    """A lock. Whoever waits for it is woken in an order that the seed decides."""

    def __init__(self) -> None:
        self._world = here()
        self._is_taken = False
        self._waiting: list[Wait] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        world.point()
        deadline = None if timeout < 0 else world.now + timeout
        while self._is_taken:
            if not blocking or (deadline is not None and world.now >= deadline):
                return False
            self._waiting.append(world.next_wait())
            world.block(deadline)
        self._is_taken = True
        return True

    def release(self) -> None:
        self._is_taken = False
        waiting, self._waiting = self._waiting, []
        for wait in waiting:
            self._world.wake(wait)

    def locked(self) -> bool:
        return self._is_taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A lock that its owner may take again."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is self._world.running:
            self._depth += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._owner, self._depth = self._world.running, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._owner = None
            super().release()

    def give_up(self) -> int:
        """Release it wholly; return how often it was taken."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


class Condition:
    """A condition variable."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._world = here()
        self._lock = RLock() if lock is None else lock
        self._waiting: list[Wait] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        world = self._world
        me = world.next_wait()
        self._waiting.append(me)
        depth = self._lock.give_up() if isinstance(self._lock, RLock) else 0
        if not depth:
            self._lock.release()
        try:
            return world.block(None if timeout is None else world.now + timeout)
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            if depth:
                assert isinstance(self._lock, RLock)
                self._lock.take_back(depth)
            else:
                self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self._world.now + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        woken, self._waiting = self._waiting[:n], self._waiting[n:]
        for wait in woken:
            self._world.wake(wait)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """A flag to wait for."""

    def __init__(self) -> None:
        self._condition = Condition(Lock())
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._condition:
            self._is_set = True
            self._condition.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return bool(self._condition.wait_for(lambda: self._is_set, timeout))


class Semaphore:
    """A counter to wait on."""

    def __init__(self, value: int = 1) -> None:
        self._condition = Condition(Lock())
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._condition:
            if not self._value and (not blocking or not self._condition.wait_for(lambda: self._value, timeout)):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._condition:
            self._value += n
            self._condition.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """A thread of the process that makes it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        assert group is None
        self._world = here()
        self._run = lambda: target(*args, **(kwargs or {})) if target is not None else None
        self.name = name or "thread"
        self.daemon = daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._world.point()
        self._task = self._world.spawn(self._world.running.process, self.name, self._run, self)

    def join(self, timeout: float | None = None) -> None:
        world, task = self._world, self._task
        if task is None:
            raise RuntimeError("cannot join thread before it is started")
        if task is world.running:
            raise RuntimeError("cannot join current thread")
        deadline = None if timeout is None else world.now + timeout
        world.point()
        while not task.is_done and (deadline is None or world.now < deadline):
            task.waiters.append(world.next_wait())
            world.block(deadline)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number

    @property
    def native_id(self) -> int | None:
        return self.ident


class SimpleQueue:
    """A queue without a limit."""

    def __init__(self) -> None:
        self._world = here()
        self._items: deque[Any] = deque()
        self._waiting: deque[Wait] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._world.point()
        self._add(item)
        if self._waiting:
            self._world.wake(self._waiting.popleft())

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        world = self._world
        world.point()
        deadline = None if timeout is None else world.now + timeout
        while not self._items:
            if not block or (deadline is not None and world.now >= deadline):
                raise real_queue.Empty
            me = world.next_wait()
            self._waiting.append(me)
            try:
                world.block(deadline)
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
        return self._take()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    def _add(self, item: Any) -> None:
        self._items.append(item)

    def _take(self) -> Any:
        return self._items.popleft()


class Queue(SimpleQueue):
    """A queue; a limit is not simulated."""

    def __init__(self, maxsize: int = 0) -> None:
        assert maxsize <= 0, "the simulation has no queues with a limit"
        super().__init__()


class PriorityQueue(Queue):
    """A queue that gives the smallest item first."""

    def _add(self, item: Any) -> None:
        ordered = list(self._items)
        heapq.heappush(ordered, item)
        self._items = deque(ordered)

    def _take(self) -> Any:
        ordered = list(self._items)
        item = heapq.heappop(ordered)
        self._items = deque(ordered)
        return item


class Future(RealFuture):  # type: ignore[type-arg]
    """A future whose waits are simulated."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # type: ignore[assignment]


def at_exit(_stage: object, _close: Callable[[], None]) -> Callable[[], None]:
    """Stand for the process's exit hook: a simulated process closes what it has opened by itself."""
    return lambda: None


def _module(name: str, real: ModuleType, passed_on: Sequence[str], **names: Any) -> Any:
    made = ModuleType(f"storm's {name}")
    for each in passed_on:
        setattr(made, each, getattr(real, each))
    for each, value in names.items():
        setattr(made, each, value)
    return made


def _current_thread() -> Any:
    handle = here().running.handle
    return handle if handle is not None else _Main()


class _Main(Thread):
    def __init__(self) -> None:
        super().__init__(name="MainThread")
        self._task = here().running


threading = _module(
    "threading", real_threading, ("local", "ThreadError"),
    Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Semaphore=Semaphore, BoundedSemaphore=Semaphore,
    Thread=Thread, current_thread=_current_thread, get_ident=lambda: here().running.number,
    main_thread=lambda: None,
)  # fmt: skip

queue = _module(
    "queue", real_queue, ("Empty", "Full"), SimpleQueue=SimpleQueue, Queue=Queue, PriorityQueue=PriorityQueue
)


def _now() -> float:
    return here().now


def _sleep(seconds: float) -> None:
    here().sleep(seconds)


time = _module(
    "time", real_time, ("strftime", "localtime", "gmtime"), sleep=_sleep,
    monotonic_ns=lambda: int(_now() * 1e9), perf_counter_ns=lambda: int(_now() * 1e9),
    **dict.fromkeys(("monotonic", "time", "perf_counter", "process_time", "thread_time"), _now),
)  # fmt: skip


def _token(size: int = 32) -> bytes:
    return here().random.randbytes(size)


secrets = _module(
    "secrets", real_secrets, ("compare_digest",), token_bytes=_token, token_hex=lambda size=32: _token(size).hex()
)

__all__ = ["Future", "World", "at_exit", "queue", "secrets", "threading", "time"]
