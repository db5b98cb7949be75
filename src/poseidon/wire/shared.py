"""Memory that processes of one machine share, without a name in any file system: nothing can be left behind."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

from poseidon.errors import WireError

_TOKEN_BYTES = 16
_PAGE = mmap.PAGESIZE
_HAND_OUT_S = 10.0
"""How long the owner may take to hand out its memory."""


class SharedBlock:
    """Some bytes of memory, zero at first, that other processes of the same user can map too.

    The kernel frees it when the last process that maps it has ended, however it ends, and counts it like any other
    memory: the size of ``/dev/shm``, which is small in containers, does not matter. A page is used when it is written.
    """

    def __init__(self, memory: mmap.mmap, handle: tuple[int, int, str], counter: socket.socket | None = None) -> None:
        self._memory = memory
        self._counter = counter
        self.handle = handle
        """What :meth:`open` needs; plain data. It can be opened while :meth:`unlist` has not been called."""

    @classmethod
    def create(cls, size: int) -> SharedBlock:
        """Return new memory; raises ``WireError`` where the system has none of this kind."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            number = os.memfd_create("poseidon", os.MFD_CLOEXEC)
        except (AttributeError, OSError) as error:
            raise WireError(f"this system has no anonymous shared memory ({error})") from error
        try:
            os.ftruncate(number, _PAGE + size)
            memory = mmap.mmap(number, _PAGE + size)
        except OSError as error:
            os.close(number)
            raise WireError(f"no {size} bytes of shared memory ({error})") from error
        memory[:_TOKEN_BYTES] = token
        return cls(memory, (os.getpid(), number, token.hex()), _hand_out(number, token.hex()))

    @classmethod
    def open(cls, handle: Sequence[Any]) -> SharedBlock:
        """Map another process's memory, given its handle; raises ``WireError`` if that process cannot be seen."""
        owner, number, token = handle
        try:
            opened = _open_of(owner, number, token)
        except OSError as error:
            raise WireError(f"the memory of process {owner} cannot be opened ({error})") from error
        try:
            memory = mmap.mmap(opened, 0)
        except (OSError, ValueError) as error:
            raise WireError(f"the memory of process {owner} cannot be mapped ({error})") from error
        finally:
            os.close(opened)
        # In another container the same number may be another process.
        if memory[:_TOKEN_BYTES].hex() != token:
            raise WireError(f"process {owner} is another one here: the workers do not see each other's processes")
        return cls(memory, (owner, number, token))

    @property
    def data(self) -> memoryview:
        """The bytes."""
        return memoryview(self._memory)[_PAGE:]

    def unlist(self) -> None:
        """Let nobody else open it; for the process that created it."""
        os.close(self.handle[1])
        if self._counter is not None:
            # Closing alone would not wake the thread that waits for others.
            self._counter.shutdown(socket.SHUT_RDWR)
            self._counter.close()


def _open_of(owner: int, number: int, token: str) -> int:
    """Return a descriptor of another process's memory."""
    try:
        return os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as refused:
        # A worker in a user namespace of its own, as under `--auto`, may not look into others, but may be given.
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_HAND_OUT_S)
            try:
                asking.connect(_counter_name(token))
                _, (opened, *_), _, _ = socket.recv_fds(asking, 1, 1)
            except (OSError, ValueError):
                raise refused from None
        return opened


def _hand_out(number: int, token: str) -> socket.socket | None:
    """Give the memory's descriptor to processes of this user that ask; None where there are no such sockets."""
    counter = socket.socket(socket.AF_UNIX)
    try:
        counter.bind(_counter_name(token))
        counter.listen()
    except OSError:
        counter.close()
        return None
    threading.Thread(target=_serve, args=(counter, number), name="poseidon-memory", daemon=True).start()
    return counter


def _serve(counter: socket.socket, number: int) -> None:
    while True:
        try:
            asking, _ = counter.accept()
            with asking:
                peer = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                if struct.unpack("3i", peer)[1] == os.getuid():
                    socket.send_fds(asking, [b"x"], [number])
        except ConnectionError:
            continue
        except OSError:
            return  # closed


def _counter_name(token: str) -> str:
    """Return a name outside the file system; whoever knows it is checked all the same."""
    return f"\0poseidon-memory-{token}"
