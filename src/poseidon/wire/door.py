"""How connections begin: a door that lets the job's ranks in, and the way through another rank's door.

A stranger must not keep ranks out. Every connection has its handshake on a thread of its own, with one deadline for all
of it, and no more than :data:`STRANGERS` at a time; a rank that is turned away in the crowd tries again.

A process that has no descriptors left tries again too, since others may be closed, and then says so of itself.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection

from poseidon.errors import ConfigError, FrameError, WireError
from poseidon.job.elastic import epoch_is_over
from poseidon.wire.address import place_text
from poseidon.wire.handshake import Credentials
from poseidon.wire.sending import CUT_S, shut

HANDSHAKE_S = 10.0
"""For a whole handshake, however slowly its bytes come."""
RETRY_S = 0.2
TRY_S = 3.0
"""For one attempt to reach a machine: until it answers there is nothing that could be cut when the epoch is over."""
STRANGERS = 64
"""Connections that may be in a handshake at a time; a further one ends the oldest, which has had the most time."""
LISTEN_S = 5.0
"""How long a rank that has no descriptor for its listener waits for one."""

_CONNECTIONS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_NOTING = threading.Lock()


def cut_connections() -> None:
    """Shut down every connection of this process that began here: whoever waits on one returns at once."""
    with _NOTING:
        connections = list(_CONNECTIONS)
    for connection in connections:
        shut(connection)


def _note(connection: socket.socket) -> socket.socket:
    with _NOTING:
        _CONNECTIONS.add(connection)
    return connection


class Door:
    """Accepts connections of one rank's listener from construction until :meth:`close`.

    ``serve`` is called with every connection that proved to be of another rank, and with that rank, on a thread of its
    own; the connection is its to close. ``refuse`` hears why others were turned away: a short name, and a sentence.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        rank: int,
        size: int,
        serve: Callable[[socket.socket, int], None],
        refuse: Callable[[str, str], None],
        announced: Collection[str] = (),
    ) -> None:
        self.announced = announced
        """Addresses of the job's machines; once they are known, nobody else gets as far as a handshake."""
        self._listener = listener
        self._credentials = credentials
        self._rank = rank
        self._size = size
        self._hand_over = serve
        self._refuse = refuse
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}
        """Connections in a handshake, the oldest first."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._admit, name="poseidon-wire-door", daemon=True)
        self._thread.start()

    def close(self, ends_served: bool) -> None:
        """Let nobody in any more, and end the handshakes; with ``ends_served`` also what is being served."""
        self._closing.set()
        shut(self._listener)
        self._listener.close()
        with self._lock:
            threads = [*self._threads.values(), self._thread]
            for connection in self._threads if ends_served else self._strangers:
                shut(connection)
        # One that never returns ends with the process.
        last = time.monotonic() + CUT_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, last - time.monotonic()))

    def _admit(self) -> None:
        while not self._closing.is_set():
            try:
                connection, (ip, *_) = self._listener.accept()
            except OSError as error:
                # Too many open files, or a connection that has ended already: others may fare better.
                if not self._closing.wait(RETRY_S):
                    why = lack_of_descriptors(error) or str(error)
                    self._refuse("accept", f"the listener could not accept a connection: {why}")
                continue
            if self.announced and ip not in self.announced:
                self._refuse("stranger", f"a connection came from {ip}, where no worker of this job is")
                connection.close()
                continue
            self._let_in(connection)

    def _let_in(self, plain: socket.socket) -> None:
        """Start a thread for a connection, which may still be anybody's."""
        connection, is_crowded = plain, False
        try:
            connection = _note(self._credentials.wrap(plain, is_listener=True))
            thread = threading.Thread(target=self._serve, args=(connection,), name="poseidon-wire-in", daemon=True)
            with self._lock:
                if self._closing.is_set():
                    connection.close()
                    return
                is_crowded = len(self._strangers) >= STRANGERS
                if is_crowded:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    shut(oldest)
                self._strangers[connection] = None
                self._threads[connection] = thread
                thread.start()
        except (OSError, RuntimeError) as error:
            # It has ended already, or there can be no more threads.
            connection.close()
            self._forget(connection)
            self._refuse("accept", f"a connection could not be served: {error}")
        if is_crowded:
            self._refuse("too many strangers", f"more than {STRANGERS} connections are in a handshake")

    def _serve(self, connection: socket.socket) -> None:
        try:
            sender = self._welcome(connection)
            if sender is not None:
                self._hand_over(connection, sender)
        finally:
            self._forget(connection)

    def _welcome(self, connection: socket.socket) -> int | None:
        """Return whose connection it is; close it if it is nobody's."""
        reason = "handshake"
        try:
            sender = self._credentials.welcome(connection, self._rank, self._size, time.monotonic() + HANDSHAKE_S)
            with self._lock:
                self._strangers.pop(connection, None)
            connection.settimeout(None)
            return sender
        except FrameError as error:
            reason, why = error.reason, str(error)
        except OSError as error:
            why = f"a connection ended inside its handshake: {error}"
        except Exception as error:
            why = f"a handshake failed: {type(error).__name__}: {error}"
        connection.close()
        if not self._closing.is_set():
            self._refuse(reason, why)
        return None

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._threads.pop(connection, None)


def listen(rank: int, ip: str, backlog: int) -> socket.socket:
    """Return a listener at a free port of ``ip``; ``WireError`` or ``ConfigError`` if there can be none."""
    deadline = time.monotonic() + LISTEN_S
    while True:
        try:
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            return socket.create_server((ip, 0), family=family, backlog=backlog + STRANGERS)
        except OSError as error:
            lack = lack_of_descriptors(error)
            if not lack:
                raise WireError(f"rank {rank} cannot listen on {ip}: {error}; is it this machine's address?") from None
            if time.monotonic() + RETRY_S > deadline:
                raise ConfigError(f"rank {rank} cannot listen on {ip}: {lack}") from None
        time.sleep(RETRY_S)


def enter(
    credentials: Credentials, rank: int, peer: int, address: tuple[str, int], source_ip: str, limit_s: float
) -> socket.socket:
    """Return an authenticated connection of ``rank`` to the door of ``peer``, which has ``limit_s`` to let it in.

    ``WireError`` names the peer that cannot be reached, ``ConfigError`` what this process lacks.
    """
    deadline = time.monotonic() + limit_s
    while True:
        lack = ""
        try:
            return _try_to_enter(credentials, rank, peer, address, source_ip, deadline)
        except FrameError as error:
            if error.reason not in ("handshake", "slow handshake"):
                raise _unreachable(peer, f"{error}; use the same on all workers") from None
            problem: Exception = error
        except OSError as error:
            problem, lack = error, lack_of_descriptors(error)
        # Where many strangers are at the door, a connection may have to try again; nothing else recovers sooner.
        may_recover = not isinstance(problem, OSError) or isinstance(problem, ConnectionResetError | TimeoutError)
        if not (may_recover or lack) or epoch_is_over() or time.monotonic() + RETRY_S > deadline:
            what = f"rank {rank} could not connect to rank {peer} at {place_text(address)} within {limit_s:g} s"
            if lack:
                raise ConfigError(f"{what}: {lack}") from None
            hint = "check that its machine is up and that no firewall is in between"
            raise _unreachable(peer, f"{what}: {problem}; {hint}") from None
        time.sleep(RETRY_S)


def _try_to_enter(
    credentials: Credentials, rank: int, peer: int, address: tuple[str, int], source_ip: str, deadline: float
) -> socket.socket:
    with contextlib.ExitStack() as undo:
        left_s = min(TRY_S, max(0.1, deadline - time.monotonic()))
        plain = undo.enter_context(_note(socket.create_connection(address, left_s, (source_ip, 0))))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = undo.enter_context(_note(credentials.wrap(plain, is_listener=False)))
        # The door has no more patience than this, so a silence that is longer will not end.
        credentials.enter(connection, rank, peer, min(deadline, time.monotonic() + HANDSHAKE_S))
        undo.pop_all()
    connection.settimeout(None)
    return connection


def _unreachable(peer: int, why: str) -> WireError:
    failure = WireError(why)
    failure.peer = peer
    return failure


def lack_of_descriptors(error: OSError) -> str:
    """Return what to say if an error means that this process or machine has no descriptors left; else nothing."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    return f"too many open files here ({error}); raise ulimit -n"


def set_patience(connection: socket.socket, lost_after_s: float) -> None:
    """Let the kernel end a connection when the other machine does not answer for too long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_after_s * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(lost_after_s / 4)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(lost_after_s / 4)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
