"""Namespaces of network, host name and mounts without ``ip``: create them, hold them by descriptor, call inside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from poseidon.errors import ConfigError

T = TypeVar("T")

CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
MNT_DETACH = 2
HOSTS = "/etc/hosts"

HOW_TO_GET_PERMISSION = (
    "this needs Linux and the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN: run as root (sudo); in a "
    "container start it with --privileged or with --cap-add SYS_ADMIN --cap-add NET_ADMIN; as an ordinary user try "
    "`unshare --user --map-root-user poseidon lab ...`"
)


def make_namespace(hostname: str) -> tuple[int, int]:
    """Create a network and a host-name namespace; return their file descriptors, which keep them alive.

    The calling process does not enter them.
    """
    return _in_thread(lambda: _unshare_here(hostname))


def make_mounts(hosts: str) -> int:
    """Create a namespace of mounts in which ``/etc/hosts`` reads so; return its file descriptor.

    All else is as on the host, now and later.
    """
    return _in_thread(lambda: _unshare_mounts(hosts))


def bind(mounts: int, source: str, target: str) -> None:
    """Let a file stand in the place of another in a namespace of mounts; the source may be removed afterwards."""
    call_inside([], lambda: _mount(source, target, MS_BIND), mounts)


def call_inside(namespaces: Sequence[int], function: Callable[[], T], mounts: int | None = None) -> T:
    """Call a function in a thread that has entered the namespaces, and return its result.

    Sockets it opens and processes it starts stay in the namespaces; the caller's threads never enter them.
    """
    here = Path.cwd() if mounts is not None else Path("/")

    def enter_and_call() -> T:
        for namespace in namespaces:
            if _libc().setns(namespace, 0) != 0:
                raise _system_error("enter a namespace")
        if mounts is not None:
            # Threads share their working folder, and one that does may not enter. To enter moves to the root.
            if _libc().unshare(CLONE_FS) != 0 or _libc().setns(mounts, CLONE_NEWNS) != 0:
                raise _system_error("enter a namespace of mounts")
            os.chdir(here)
        return function()

    return _in_thread(enter_and_call)


def inode(namespace: int) -> int:
    """Return the number that ``/proc/PID/ns/net`` shows for processes inside."""
    return os.fstat(namespace).st_ino


def _unshare_here(hostname: str) -> tuple[int, int]:
    if _libc().unshare(CLONE_NEWNET | CLONE_NEWUTS) != 0:
        raise _system_error("make a network namespace")
    with contextlib.suppress(PermissionError):  # a name is nice to have, and some sandboxes forbid it
        socket.sethostname(hostname)
    net = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    uts = os.open("/proc/thread-self/ns/uts", os.O_RDONLY | os.O_CLOEXEC)
    return net, uts


def _unshare_mounts(hosts: str) -> int:
    if _libc().unshare(CLONE_NEWNS) != 0:
        raise _system_error("make a namespace of mounts")
    _mount("none", "/", MS_REC | MS_SLAVE)
    with tempfile.TemporaryDirectory() as folder:
        # On a file system of its own the file lives as long as the namespace. Nothing can be mounted over a file that
        # was removed, and programs inside may want a /etc/hosts of their own.
        _mount("none", folder, 0, "tmpfs")
        file = Path(folder, "hosts")
        file.write_text(hosts)
        file.chmod(0o644)
        _mount(str(file), HOSTS, MS_BIND)
        if _libc().umount2(folder.encode(), MNT_DETACH) != 0:
            raise _system_error(f"unmount {folder}")
    return os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def _mount(source: str, target: str, flags: int, kind: str = "") -> None:
    if _libc().mount(source.encode(), target.encode(), kind.encode() or None, flags, None) != 0:
        raise _system_error(f"mount {target}")


def _in_thread(function: Callable[[], T]) -> T:
    """Run a function in its own thread, because namespaces are per thread, and return its result."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="lab-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _system_error(what: str) -> ConfigError:
    number = ctypes.get_errno()
    return ConfigError(f"cannot {what} ({os.strerror(number)}); {HOW_TO_GET_PERMISSION}")
