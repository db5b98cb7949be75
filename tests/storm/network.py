"""Stand-ins for ``socket`` and ``select``: TCP between the processes of a simulated world, with its faults.

As in the kernel, bytes of one connection arrive in order or not at all, connections know nothing of each other, a
sender is ahead of its reader by as much as the buffers hold, the bytes of a dead process still arrive, and an end that
hears nothing for long gives up only if it was asked to (keep-alive, user timeout).
"""

from __future__ import annotations

import errno
import os
import select as real_select
import socket as real
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from storm.primitives import _module
from storm.world import Process, Wait, World, here

RETRANSMIT_S = 924.0
"""After this long without an answer the kernel gives a connection up that nobody gave a time limit."""
SEGMENT_BYTES = 16 << 10


class Pipe:
    """One direction of a connection."""

    def __init__(self, world: World, target: Connection) -> None:
        chance = world.random
        self.world = world
        self.target = target
        self.latency_s = chance.uniform(20e-6, 400e-6)
        self.bytes_per_s = 10 ** chance.uniform(6.5, 9)
        self.capacity = chance.choice((4 << 10, 64 << 10, 1 << 20))
        self.held = 0
        """Bytes that were sent and not acknowledged."""
        self.unreported = 0
        """Of these, bytes that have been read, but whose acknowledgement vanished."""
        self.is_dark = False
        """Whether what is sent this way vanishes, acknowledgements of the other direction included."""
        self.is_ended = False
        """Whether the sender will send nothing more."""
        self.flips = 0
        """Bits still to flip."""
        self._vanished: list[tuple[int, bytes | None]] = []
        self._early: dict[int, bytes | None] = {}
        """Pieces that wait for earlier ones, by number."""
        self._sent = self._taken = 0
        """Numbers of the next piece to send, and to hand over."""
        self._last = 0.0
        self._generation = 0

    def send(self, data: bytes) -> None:
        """Send bytes; they arrive piece by piece."""
        self.held += len(data)
        for start in range(0, len(data), SEGMENT_BYTES):
            self._put(data[start : start + SEGMENT_BYTES])

    def end(self) -> None:
        """Tell the other end, after everything that was sent, that nothing follows."""
        if not self.is_ended:
            self.is_ended = True
            self._put(None)

    def drop(self) -> None:
        """Forget what has not arrived."""
        self._generation += 1
        self._vanished, self._early, self._taken = [], {}, self._sent

    def lighten(self) -> None:
        """End the darkness: what vanished is sent again."""
        self.is_dark = False
        vanished, self._vanished = self._vanished, []
        for number, data in sorted(vanished, key=lambda piece: piece[0]):
            self._carry(number, data)

    def _put(self, data: bytes | None) -> None:
        self._sent += 1
        self._carry(self._sent - 1, data)

    def _carry(self, number: int, data: bytes | None) -> None:
        if self.is_dark:
            self._vanished.append((number, data))
            return
        size = 0 if data is None else len(data)
        jitter = self.world.random.expovariate(1 / (0.3 * self.latency_s))
        self._last = max(self._last, self.world.now + self.latency_s + jitter) + size / self.bytes_per_s
        generation = self._generation
        self.world.at(self._last, lambda: self._arrive(number, data, generation))

    def _arrive(self, number: int, data: bytes | None, generation: int) -> None:
        if generation != self._generation:
            return
        if self.is_dark:
            self._vanished.append((number, data))
            return
        self._early[number] = data
        # The kernel hands over what comes in order, and keeps the rest.
        while self._taken in self._early and generation == self._generation:
            self._taken += 1
            self._hand_over(self._early.pop(self._taken - 1))

    def _hand_over(self, data: bytes | None) -> None:
        if data and self.flips:
            self.flips -= 1
            bit = self.world.random.randrange(8 * len(data))
            broken = bytearray(data)
            broken[bit // 8] ^= 1 << bit % 8
            self.world.note(f"bit {bit} of {len(data)} bytes to {self.target.process.name} flips")
            data = bytes(broken)
        self.target.take(data)


class Socket:
    """What listeners and connections share."""

    _count = 0

    def __init__(self, process: Process) -> None:
        self.process = process
        self.world = process.world
        self.is_closed = False
        self.timeout: float | None = None
        self.options: dict[tuple[int, int], Any] = {}
        self.waits: list[Wait] = []
        """Of threads that wait for anything to change here."""
        self._number = next_number(self.world)

    def __hash__(self) -> int:
        return self._number

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return -1 if self.is_closed else self._number

    def settimeout(self, timeout: float | None) -> None:
        self.timeout = timeout

    def gettimeout(self) -> float | None:
        return self.timeout

    def setblocking(self, flag: bool) -> None:
        self.timeout = None if flag else 0.0

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        self._check_open()
        self.options[level, option] = value

    def getsockopt(self, level: int, option: int) -> Any:
        return self.options.get((level, option), 0)

    def notify(self) -> None:
        waits, self.waits = self.waits, []
        for wait in waits:
            self.world.wake(wait)

    def close(self) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _wait(self, deadline: float | None) -> None:
        """Wait for a change; raise what a socket raises if its timeout is over."""
        if self.timeout == 0.0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if deadline is not None and self.world.now >= deadline:
            raise TimeoutError("timed out")
        self.waits.append(self.world.next_wait())
        self.world.block(deadline)

    def _deadline(self) -> float | None:
        return None if self.timeout is None else self.world.now + self.timeout


class Connection(Socket):
    """One end of a connection."""

    other: Connection
    out: Pipe

    def __init__(self, process: Process, address: tuple[str, int]) -> None:
        super().__init__(process)
        self._address = address
        self.arrived = bytearray()
        self.came_to_end = False
        self.error: int = 0
        self.is_shut = False
        self.is_gone = False
        """Whether the kernel keeps nothing of this end: what arrives is answered with a reset."""
        self._alarm_s: float | None = None
        process.on_death.append(self._vanish)

    @property
    def name(self) -> str:
        """Between whom it is."""
        return f"{self.process.name}-{self.other.process.name}"

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def getpeername(self) -> tuple[str, int]:
        return self.other._address

    # Reading.

    @property
    def is_readable(self) -> bool:
        return bool(self.arrived or self.came_to_end or self.error or self.is_shut)

    @property
    def is_writable(self) -> bool:
        return bool(self.out.held < self.out.capacity or self.error or self.is_shut)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        wanted = nbytes or len(view)
        filled = 0
        deadline = self._deadline()
        self.world.point()
        while filled < wanted:
            if self.arrived:
                size = min(wanted - filled, len(self.arrived))
                view[filled : filled + size] = self.arrived[:size]
                del self.arrived[:size]
                self.other._acknowledge(size)
                filled += size
                if flags & real.MSG_WAITALL:
                    continue
                break
            if self.came_to_end or self.is_shut:
                break
            if filled and (self.error or self.timeout == 0.0):
                break
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            self._check_open()
            if filled and deadline is not None and self.world.now >= deadline:
                break
            self._wait(deadline)
        return filled

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = bytearray(size)
        return bytes(data[: self.recv_into(data, 0, flags)])

    # Writing.

    def send(self, data: Any, flags: int = 0) -> int:
        """Hand bytes to the kernel: all of them, or on a socket with a timeout as many as it takes."""
        view = memoryview(data).cast("B")
        sent = 0
        deadline = self._deadline()
        self.world.point()
        while sent < len(view):
            self._check_open()
            if self.error or self.out.is_ended:
                broken = self.error or errno.EPIPE
                raise OSError(broken, os.strerror(broken))
            room = self.out.capacity - self.out.held
            if room <= 0:
                if sent and self.timeout is not None:
                    break
                self._wait(deadline)
                continue
            piece = bytes(view[sent : sent + room])
            sent += len(piece)
            self.out.send(piece)
            if self.out.is_dark or self.other.out.is_dark:
                self._fear_silence()
            elif self.other.is_gone:
                self.fail_later(errno.ECONNRESET)
            if self.world.random.random() < 0.01:
                break  # a signal came in between
        return sent

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[self.send(view, flags) :]

    def sendmsg(self, buffers: Sequence[Any], _ancillary: object = (), flags: int = 0) -> int:
        return self.send(b"".join(bytes(memoryview(part).cast("B")) for part in buffers), flags)

    # Ending.

    def shutdown(self, how: int) -> None:
        self._check_open()
        if self.error:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        self.is_shut = how == real.SHUT_RDWR
        self.out.end()
        self.notify()

    def close(self) -> None:
        # A thread that is blocked here is not woken: the kernel does not do that either.
        if self.world.is_over or self.process.is_dead:
            return
        self.world.point()
        if not self.is_closed:
            self.is_closed = True
            self._vanish()

    def _vanish(self) -> None:
        """Let the kernel finish this end: with a reset if bytes were left unread, else after what is still to send."""
        if self.is_gone:
            return
        self.is_gone = True
        if self.arrived and not self.out.is_dark:
            self.arrived.clear()
            self.out.drop()
            self.other.fail_later(errno.ECONNRESET)
        else:
            self.out.end()

    def take(self, data: bytes | None) -> None:
        """Take what has arrived; None is the end."""
        if self.error:
            return
        if self.is_gone:
            if data:
                self.other.fail_later(errno.ECONNRESET)
            return
        if data is None:
            self.came_to_end = True
        else:
            self.arrived += data
        self.notify()

    def _acknowledge(self, size: int) -> None:
        if self.other.out.is_dark:
            self.out.unreported += size
        else:
            self.out.held -= size
            self.notify()

    # Faults.

    def fail(self, number: int) -> None:
        """End this end with an error; what has arrived can still be read."""
        if not self.error and not self.is_gone:
            self.error = number
            self.out.drop()
            self.notify()

    def fail_later(self, number: int) -> None:
        """The same when a packet from the other side has come."""
        if not self.other.out.is_dark:
            self.world.at(self.world.now + self.other.out.latency_s, lambda: self.fail(number))

    def _fear_silence(self) -> None:
        """Give up after as long as the owner asked for, unless packets come through again."""
        keeps_alive = self.options.get((real.SOL_SOCKET, real.SO_KEEPALIVE))
        limit_ms = self.options.get((real.IPPROTO_TCP, real.TCP_USER_TIMEOUT))
        if limit_ms and (keeps_alive or self.out.held):
            limit_s = limit_ms / 1000
        elif keeps_alive:
            idle, step, count = (
                self.options.get((real.IPPROTO_TCP, option), usual)
                for option, usual in ((real.TCP_KEEPIDLE, 7200), (real.TCP_KEEPINTVL, 75), (real.TCP_KEEPCNT, 9))
            )
            limit_s = idle + step * count
        elif self.out.held:
            limit_s = RETRANSMIT_S
        else:
            return
        when = self.world.now + limit_s
        if self._alarm_s is None or when < self._alarm_s:
            self._alarm_s = when
            self.world.at(when, self._give_up)

    def _give_up(self) -> None:
        self._alarm_s = None
        if self.out.is_dark or self.other.out.is_dark:
            self.fail(errno.ETIMEDOUT)

    def darken(self) -> None:
        """Let everything that is sent from here vanish."""
        self.out.is_dark = True
        self._fear_silence()
        self.other._fear_silence()

    def lighten(self) -> None:
        """Let packets through again."""
        self.out.lighten()
        reported = self.other.out
        reported.held -= reported.unreported
        reported.unreported = 0
        self.other.notify()

    def reset(self, is_told: bool) -> None:
        """Break the connection here; the other end hears of it now, or when it next sends or asks."""
        self.fail(errno.ECONNRESET)
        self.out.drop()
        other = self.other
        if is_told:
            other.fail_later(errno.ECONNRESET)
            return
        self.is_gone = True
        if other.options.get((real.SOL_SOCKET, real.SO_KEEPALIVE)):
            idle = other.options.get((real.IPPROTO_TCP, real.TCP_KEEPIDLE), 7200)
            other.world.at(other.world.now + idle, lambda: other.fail(errno.ECONNRESET))


class Listener(Socket):
    """A socket that accepts connections."""

    def __init__(self, process: Process, address: tuple[str, int], backlog: int) -> None:
        super().__init__(process)
        self._address = address
        self._backlog = backlog
        self.queue: deque[Connection] = deque()
        self.is_shut = False
        process.on_death.append(self._vanish)

    @property
    def is_readable(self) -> bool:
        return bool(self.queue) or self.is_shut

    is_writable = False

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def accept(self) -> tuple[Connection, tuple[str, int]]:
        deadline = self._deadline()
        self.world.point()
        while not self.queue:
            if self.is_shut:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._check_open()
            self._wait(deadline)
        network_of(self.world).spend_descriptor(self.process)
        connection = self.queue.popleft()
        return connection, connection.getpeername()

    def is_full(self) -> bool:
        return len(self.queue) > self._backlog

    def shutdown(self, _how: int) -> None:
        self._check_open()
        self.is_shut = True
        self.notify()

    def close(self) -> None:
        if self.world.is_over or self.process.is_dead:
            return
        self.world.point()
        if not self.is_closed:
            self.is_closed = True
            self._vanish()

    def _vanish(self) -> None:
        network_of(self.world).listeners.pop(self._address, None)
        for connection in self.queue:
            connection._vanish()
        self.queue.clear()


class Network:
    """All listeners and connections of a world."""

    def __init__(self) -> None:
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.connections: list[tuple[Connection, Connection]] = []
        """Both ends of each, the one that connected first."""
        self.dark: set[str] = set()
        """Addresses of machines that are cut off."""
        self.exhausted: dict[Process, float] = {}
        """Processes that have no descriptors left, and until when."""
        self.numbers = 100
        self.ports = 20_000

    def spend_descriptor(self, process: Process) -> None:
        """Raise what the kernel raises when a process has too many files open."""
        if self.exhausted.get(process, 0.0) > process.world.now:
            process.world.note("no descriptor left")
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def between(self, ip: str, other: str | None = None) -> list[Connection]:
        """Return the ends at ``ip`` of its connections that are open, to one address or to all."""
        return [
            end
            for pair in self.connections
            for end in pair
            if end.process.ip == ip
            and (other is None or end.other.process.ip == other)
            and end.process.ip != end.other.process.ip
            and not end.is_gone
        ]

    def cut(self, ip: str) -> None:
        """Pull a machine's cable."""
        self.dark.add(ip)
        for end in self.between(ip):
            end.darken()
            end.other.darken()


def network_of(world: World) -> Network:
    """Return a world's network."""
    if world.network is None:
        world.network = Network()
    found: Network = world.network
    return found


def next_number(world: World) -> int:
    network = network_of(world)
    network.numbers += 1
    return network.numbers


def create_server(address: tuple[str, int], *, backlog: int = 128, **_options: Any) -> Listener:
    world, (ip, port) = here(), address
    world.point()
    network = network_of(world)
    process = world.running.process
    if ip != process.ip:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    network.spend_descriptor(process)
    if not port:
        network.ports += 1
        port = network.ports
    listener = network.listeners[ip, port] = Listener(process, (ip, port), backlog)
    return listener


def create_connection(
    address: tuple[str, int], timeout: float | None = None, source_address: object = None, **_: object
) -> Connection:
    del source_address
    world = here()
    world.point()
    network = network_of(world)
    process = world.running.process
    network.spend_descriptor(process)
    deadline = None if timeout is None else world.now + timeout
    world.sleep(world.random.uniform(50e-6, 500e-6))
    while True:
        listener = network.listeners.get(address)
        is_dark = {address[0], process.ip} & network.dark and address[0] != process.ip
        if not is_dark and (listener is None or listener.is_shut):
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        if not is_dark and listener is not None and not listener.is_full():
            break
        # The kernel repeats its request; after a second at first.
        if deadline is not None and world.now + 1.0 >= deadline:
            world.sleep(deadline - world.now)
            raise TimeoutError("timed out")
        world.sleep(1.0)
    network.ports += 1
    near, far = Connection(process, (process.ip, network.ports)), Connection(listener.process, address)
    near.other, far.other = far, near
    near.out, far.out = Pipe(world, far), Pipe(world, near)
    near.timeout = timeout
    network.connections.append((near, far))
    listener.queue.append(far)
    listener.notify()
    return near


class Poll:
    """Waits for any of several sockets to become readable."""

    def __init__(self) -> None:
        self._world = here()
        self._wanted: list[tuple[Any, int]] = []

    def register(self, sock: Any, events: int) -> None:
        self._wanted.append((sock, events))

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        world = self._world
        world.point()
        deadline = None if timeout_ms is None or timeout_ms < 0 else world.now + timeout_ms / 1e3
        while not (found := [(sock, ready) for sock, events in self._wanted if (ready := _ready(sock) & events)]):
            if deadline is not None and world.now >= deadline:
                return []
            wait = world.next_wait()
            for sock, _ in self._wanted:
                sock.waits.append(wait)
            world.block(deadline)
        return [(sock.fileno(), ready) for sock, ready in found]


def _ready(sock: Any) -> int:
    return (real_select.POLLIN if sock.is_readable else 0) | (real_select.POLLOUT if sock.is_writable else 0)


class Probe:
    """A datagram socket, as far as it serves to find this machine's own address."""

    def __init__(self, family: int, kind: int) -> None:
        assert (family, kind) == (real.AF_INET, real.SOCK_DGRAM), "streams come from create_connection, create_server"

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, address: object) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return here().running.process.ip, 0

    @staticmethod
    def shutdown(sock: Any, how: int) -> None:
        """Serve who asks the class for a socket's method."""
        sock.shutdown(how)


_CONSTANTS = [name for name in dir(real) if name.isupper() and isinstance(getattr(real, name), int)]
_ERRORS: Sequence[str] = ("error", "timeout", "gaierror", "inet_ntoa", "inet_aton", "inet_pton")
_gethostname: Callable[[], str] = lambda: here().running.process.name  # noqa: E731

socket = _module(
    "socket", real, (*_CONSTANTS, *_ERRORS), socket=Probe, create_server=create_server,
    create_connection=create_connection, gethostname=_gethostname,
)  # fmt: skip
select = _module("select", real_select, ("POLLIN", "POLLOUT", "POLLERR", "POLLHUP"), poll=Poll)
