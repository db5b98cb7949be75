"""A folder kept as it was at the start: what worker 0 adds, replaces or removes in it later is not seen.

All workers run one script. One that saw what worker 0 has just written would take another turn: find a folder that it
is about to create, read half a file, open a database that has its tables already. So each keeps the names of the start,
and small files too; large ones share their content with the real file, by a clone where the disk can, else by a link.
A folder with too many files stays *live*: what worker 0 adds there may be seen.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from poseidon.auto.private.outline import is_inside

MOST_ENTRIES = 4_000
MOST_LIVE = 64
MOST_BYTES = 128 << 20
_LIVE_IN_ONE = 8
"""A folder with more live ones inside is live itself: each of them takes a mount."""
_SMALL_BYTES = 8 << 20
_CLONE = 0x40049409
_NEVER_FROZEN = (".", "node_modules")
"""Beginnings of folder names: what tools keep there, such as `.git`, is much and not the script's."""
_MARKER_OF_ENVIRONMENT = "pyvenv.cfg"


@dataclass(frozen=True)
class Survey:
    """Which folders are frozen, parents first, and which are live, by absolute path."""

    frozen: tuple[str, ...]
    live: tuple[str, ...]


def survey(root: str, live: Collection[str], hidden: str = "", most: int = MOST_ENTRIES) -> Survey:
    """Divide a folder; ``live`` names folders inside it that cannot be frozen, ``hidden`` one that is left out.

    Without any frozen one, all is live.
    """
    frozen: list[str] = []
    found = set()
    ahead, count = [root], 0
    while ahead:
        folder = ahead.pop(0)
        entries = _entries(folder)
        is_left = folder in live or (folder != root and Path(folder).name.startswith(_NEVER_FROZEN))
        if is_left or entries is None or count + len(entries) > most or _has_environment(entries):
            found.add(folder)
            continue
        count += len(entries)
        frozen.append(folder)
        folders = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        ahead += [path for path in folders if path != hidden]
    return _collapse(root, frozen, found)


class Preserver:
    """Copies folders as they are now; large files, and all after ``left_bytes``, share their content by a link."""

    def __init__(self, left_bytes: int = MOST_BYTES) -> None:
        self._left_bytes = left_bytes
        self._can_clone = True

    def freeze(self, parts: Survey, root: str, target: Path, hidden: str = "") -> Survey:
        """Copy the frozen folders of ``root`` to ``target``, without ``hidden``.

        Return the division that has come about: a folder with a file that cannot be kept is live.
        """
        refused: set[str] = set()
        for folder in parts.frozen:
            if any(is_inside(folder, one) for one in refused):
                continue
            try:
                foreign = self.copy_level(folder, _place(folder, root, target), hidden)
                is_kept = not foreign
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                is_kept = False
            if not is_kept and folder == root:
                return Survey((), (root,))
            if not is_kept:
                refused.add(folder)
        live = {*parts.live, *refused}
        outer = sorted(one for one in live if not any(is_inside(one, other) and one != other for other in live))
        for folder in outer:
            _place(folder, root, target).mkdir(exist_ok=True)
        return Survey(
            tuple(one for one in parts.frozen if not any(is_inside(one, other) for other in outer)), tuple(outer)
        )

    def copy_level(self, folder: str, place: Path, hidden: str = "") -> list[str]:
        """Copy a folder, with empty subfolders; return the files of others, which we can neither link nor change."""
        place.mkdir(exist_ok=True)
        foreign = []
        entries = _entries(folder)
        if entries is None:
            raise PermissionError(errno.EACCES, "cannot be listed", folder)
        for entry in entries:
            new = place / entry.name
            if entry.path == hidden:
                continue
            if entry.is_symlink():
                new.symlink_to(Path(entry.path).readlink())
            elif entry.is_dir(follow_symlinks=False):
                new.mkdir()
                _copy_status(entry.path, new)
            elif entry.is_file() and not self._keep(entry.path, new):
                foreign.append(entry.path)
        _copy_status(folder, place)
        if not os.access(folder, os.W_OK):
            place.chmod(place.stat().st_mode & 0o7555)
        return foreign

    def _keep(self, path: str, new: Path) -> bool:
        """Put a file's present content at ``new``; return False if it is another user's, which we cannot change."""
        try:
            size = Path(path).lstat().st_size
            if os.access(path, os.R_OK):
                self._can_clone = self._can_clone and _clone(path, new)
                if self._can_clone:
                    _copy_status(path, new)
                    return True
                if size <= min(_SMALL_BYTES, self._left_bytes):
                    self._left_bytes -= size
                    _copy(path, new)
                    return True
            os.link(path, new)
        except FileNotFoundError:
            return True  # removed meanwhile: another program's temporary file
        except PermissionError:
            return False
        return True


def _place(folder: str, root: str, target: Path) -> Path:
    return Path(f"{target}{folder.removeprefix(root)}")


def _copy(path: str, new: Path) -> None:
    """Copy a small file. ``shutil.copy2`` takes three times as long, and there may be thousands."""
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(source)
        copy = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while content := os.read(source, status.st_size + 1):
                os.write(copy, content)
            os.fchmod(copy, status.st_mode & 0o7777)
            os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
            if os.geteuid() == 0:
                os.fchown(copy, status.st_uid, status.st_gid)
        finally:
            os.close(copy)
    finally:
        os.close(source)


def _clone(path: str, new: Path) -> bool:
    with Path(path).open("rb") as source, new.open("xb") as copy, contextlib.suppress(OSError):
        fcntl.ioctl(copy, _CLONE, source.fileno())
        return True
    new.unlink()
    return False


def _copy_status(path: str, new: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.copystat(path, new, follow_symlinks=False)
        if os.geteuid() == 0:
            status = os.lstat(path)
            os.chown(new, status.st_uid, status.st_gid, follow_symlinks=False)


def _entries(folder: str) -> list[os.DirEntry[str]] | None:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return None


def _has_environment(entries: list[os.DirEntry[str]]) -> bool:
    """Whether a folder is a virtual environment, which has many files and changes by none of them."""
    return any(entry.name == _MARKER_OF_ENVIRONMENT for entry in entries)


def _collapse(root: str, frozen: list[str], live: set[str]) -> Survey:
    for folder in sorted(frozen, key=len, reverse=True):
        if folder != root and sum(is_inside(one, folder) for one in live) > _LIVE_IN_ONE:
            live = {one for one in live if not is_inside(one, folder)} | {folder}
    if len(live) > MOST_LIVE:
        live = {root}
    kept = [one for one in frozen if not any(is_inside(one, other) for other in live)]
    return Survey(tuple(kept), tuple(sorted(live)))
