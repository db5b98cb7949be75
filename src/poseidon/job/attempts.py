"""Calls that wait for other workers inside torch's C++ code, and are given up when their epoch is over.

Most such waits end when their sockets are cut (``cutting.py``). Two kinds do not: a store's client tries again and
again to connect to a worker that is gone, and gloo waits for a connection that a lost worker would have opened, without
any socket of its own. So in an elastic job these calls run on a thread of their own, left behind if it must be.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from poseidon.errors import WorkerLostError
from poseidon.job.elastic import ElasticJob, this_job

T = TypeVar("T")

CUT_OFF_S = 1.0
"""How long a call has to fail by itself, once its epoch is over and its connections are cut."""


def within_epoch(call: Callable[[], T], what: str) -> T:
    """Return what ``call`` returns, or raise what it raises; ``what``: what it waits for.

    In an elastic job, :class:`~poseidon.errors.WorkerLostError` if the epoch is over and the call does not end. It then
    goes no further than to the end of what it does in C++ now.
    """
    job = this_job()
    return call() if job is None else Attempt(call).end_with(job, what)


class Attempt(Generic[T]):
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._is_done = False
        self._is_left = False
        self._changed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="poseidon-attempt", daemon=True)

    def end_with(self, job: ElasticJob, what: str) -> T:
        """Run the call until it is done, or the job's present epoch is over."""
        lost = WorkerLostError(
            f"gave up waiting for {what}: the epoch is over, because a worker was lost or others join"
        )
        if job.is_over:
            raise lost
        self._changed = job.look_again
        self._thread.start()
        job.wait_for(lambda: self._is_done or job.is_over)
        if not self._is_done:
            self._thread.join(CUT_OFF_S)
            if not self._leave():
                raise lost
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        # What ends a call that was left behind may come once the call has ended by itself, but before this has.
        with contextlib.suppress(SystemExit):
            self._finish()

    def _finish(self) -> None:
        try:
            result = self._call()
            error: BaseException | None = None
        except BaseException as failure:
            error = failure
        with self._lock:
            if not self._is_left:
                if error is None:
                    self._result.append(result)
                self._error, self._is_done = error, True
        self._changed()

    def _leave(self) -> bool:
        """Leave the call behind, unless it is done by now; return whether it is."""
        with self._lock:
            if not self._is_done:
                self._is_left = True
                # Raised as soon as the thread is back from C++. What the call would do next belongs to an epoch that is
                # over: it must not become the process group of another one.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), _left_behind())
            return self._is_done


def _left_behind() -> Any:
    return ctypes.py_object(SystemExit)
