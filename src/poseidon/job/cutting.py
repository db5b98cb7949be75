"""Ends connections from another thread: whoever is blocked in one returns at once, in torch's C++ code too.

A thread that waits inside gloo or torch's store cannot be interrupted, and may wait for a worker that is gone. So the
sockets that they open are noted, and shut down when the wait is in vain.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from poseidon.job.filter import is_listening, open_sockets, socket_inodes


class NotedSockets:
    """The sockets that this process opened inside :meth:`noting`. Any thread may cut them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: set[int] = set()
        self._before: list[set[int]] = []
        """For each open context: the sockets that were there when it began."""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is opened inside the context; what another thread opens meanwhile counts too."""
        before = socket_inodes()
        with self._lock:
            self._before.append(before)
        try:
            yield
        finally:
            with self._lock:
                self._before.remove(before)
                self._noted |= socket_inodes() - before

    def cut(self) -> None:
        """Shut down what was noted, and what the open contexts have opened so far; listeners stay."""
        with self._lock:
            noted, before = set(self._noted), list(self._before)
        for inode, found in open_sockets().items():
            with found:
                # Where gloo cannot accept any more, it aborts the process.
                is_network = found.family in (socket.AF_INET, socket.AF_INET6)
                if (
                    is_network
                    and not is_listening(found)
                    and (inode in noted or any(inode not in each for each in before))
                ):
                    with contextlib.suppress(OSError):
                        found.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Note nothing any more of what was opened so far."""
        with self._lock:
            self._noted.clear()


TORCH = NotedSockets()
"""The connections of torch's process groups and stores."""
