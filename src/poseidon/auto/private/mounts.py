"""The system calls behind a private view: namespaces, overlays, the change of the root."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_NEW_NAMESPACE, _NEW_USERS = 0x00020000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_DETACH = 2
_KEPT = ("volatile", "")
"""Options of an overlay, the best first: what is thrown away need not be synced to the disk (Linux 5.10)."""


def isolate() -> bool:
    """Give this process its own table of mounts; return whether it needed its own user namespace for that.

    The process must have a single thread. Its user and group stay what they are.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _NEW_NAMESPACE)
        has_users = False
    except PermissionError:
        _call("unshare", _NEW_NAMESPACE | _NEW_USERS)
        has_users = True
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount(None, "/", None, _PRIVATE | _RECURSIVE)
    return has_users


def bind(source: str, target: str) -> None:
    """Make a file or folder visible at another path too, with the mounts inside it."""
    _mount(source, target, None, _BIND | _RECURSIVE)


def overlay(lower: str, upper: Path, target: str, is_user: bool) -> None:
    """Mount ``lower`` at ``target``, with changes kept in ``upper``, which must be an empty folder."""
    above, work = upper / "above", upper / "work"
    for folder in (above, work):
        folder.mkdir()
    # The top of an overlay has the owner and permissions of its upper folder.
    status = Path(lower).stat()
    # Ours now, so that its permissions must refuse what another owner would.
    is_closed = is_user and not os.access(lower, os.W_OK)
    above.chmod(status.st_mode & (0o7555 if is_closed else 0o7777))
    if not is_user:
        os.chown(above, status.st_uid, status.st_gid)
    descriptors = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (lower, above, work)]
    try:
        # By descriptor: a path may contain the colons and commas that separate options.
        names = [f"/proc/self/fd/{number}" for number in descriptors]
        layers = f"lowerdir={names[0]},upperdir={names[1]},workdir={names[2]}"
        # Only root may let a folder be renamed without copying it.
        options = f"{layers},userxattr" if is_user else f"{layers},redirect_dir=on"
        for kept in _KEPT:
            try:
                _mount("overlay", target, "overlay", 0, f"{options},{kept}" if kept else options)
                return
            except OSError:
                if not kept:
                    raise
    finally:
        for number in descriptors:
            os.close(number)


def change_root(root: str) -> None:
    """Make ``root``, a mount point, the root of this process; the old one is out of reach."""
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir("/")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    try:
        _call("mount", words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} (mount {kind or 'of'} {target})") from None


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise (
            OSError(number, f"{os.strerror(number)} ({name})")
            if name != "mount"
            else OSError(number, os.strerror(number))
        )
