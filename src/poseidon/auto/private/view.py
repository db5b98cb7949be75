"""Gives a worker its private view of the file system, before its script's process starts.

It holds for everything the worker runs, in any language and in any child process. The real files are below the view and
cannot be reached; files that are already open (the worker's output) stay what they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from poseidon.auto.private import mounts
from poseidon.auto.private.frozen import Preserver, survey
from poseidon.auto.private.outline import (
    SYSTEM,
    Mount,
    ViewPart,
    is_inside,
    outermost_inside,
    outline,
    parse_mounts,
)
from poseidon.files import cannot
from poseidon.launch.scratch import Scratch, create, guard, remove, sweep

PRIVATE = "private"
"""Value of ``POSEIDON_VIEW`` in a worker that has its own view."""
_MOST_SEARCHED, _MOST_SOCKETS = 1000, 64
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")


def enter(directory: Path, words: Sequence[str]) -> str | None:
    """Enter a private view; return None, or why there can be none, and nothing has changed.

    ``words`` are the script's arguments: folders that they name are kept as they are now, like the working directory.
    For a process with a single thread, which must start another program afterwards: that one has no privileges left
    over from the change.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has no mount namespaces"
    sweep(directory)
    table = _read_mounts()
    try:
        scratch = create(directory, {mount.device: mount.kind for mount in table})
    except OSError as error:
        return f"no scratch folder: {error}"
    reason = _try(scratch)
    if reason is None:
        guard(scratch)
        try:
            _build(scratch.folder, _frozen_roots(directory, words))
            os.chdir(directory)
        except OSError as error:
            raise cannot("write", "private files", scratch.folder, error) from error
        return None
    remove(scratch.folder)
    os.close(scratch.lock)
    return reason


def shared_folders(directory: str) -> list[str]:
    """Return the caches of downloads and compiled kernels, which are made for several processes at a time."""
    cache = [os.environ.get(name, "") for name in _CACHES] + ["~/.cache"]
    found = {str(Path(one).expanduser().resolve()) for one in cache if one}
    return sorted(one for one in found if Path(one).is_dir() and not is_inside(directory, one))


def _frozen_roots(directory: Path, words: Sequence[str]) -> list[str]:
    """Return the folders to freeze: the working directory, and those outside it that arguments name or would create.

    What contains the working directory, home or all temporary files is too much to freeze.
    """
    here = str(directory)
    broad = (here, str(Path.home()), str(Path(tempfile.gettempdir()).resolve()))
    found = []
    for word in words:
        value = word.partition("=")[2] if word.startswith("-") else word
        if not value.startswith(("/", "~", "..")):
            continue
        try:
            path = Path(value).expanduser().resolve()
            while not path.is_dir():
                path = path.parent
        except (OSError, ValueError, RuntimeError):
            continue
        found.append(str(path))
    named = [one for one in found if not any(is_inside(wide, one) for wide in broad) and not is_inside(one, here)]
    return [here, *outermost_inside(named, "/")]


def _read_mounts() -> list[Mount]:
    return parse_mounts(Path("/proc/self/mountinfo").read_text())


def _try(scratch: Scratch) -> str | None:
    """Build a view in a child, which takes it along when it ends; return why that failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            trial = scratch.folder / "trial"
            trial.mkdir()
            _build(trial, [])
            os.write(writing, b"ok")
        except BaseException as error:
            os.write(writing, str(error).encode()[:400])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return None if said == "ok" else said or "the trial ended without a word"


def _build(folder: Path, roots: Sequence[str]) -> None:
    """Mount the view below ``folder`` and make it this process's root."""
    directory = str(Path.cwd())
    is_user = mounts.isolate()
    table = _read_mounts()
    shared = shared_folders(directory)
    root = folder / "root"
    root.mkdir()
    mounts.bind(str(root), str(root))
    builder = _Builder(folder, is_user)
    for part in outline(table, shared, _subfolders, is_user):
        builder.add(part)
    for path in roots:
        if any(is_inside(path, one) for one in (*SYSTEM, *shared)) or path == "/":
            continue
        fixed = outermost_inside([*(mount.point for mount in table), *shared], path)
        for live in builder.add_frozen(path, fixed):
            for part in outline(table, shared, _subfolders, is_user, live):
                builder.add(part)
    for path in _sockets(tempfile.gettempdir()):
        builder.keep_socket(path)
    builder.hide(str(folder))
    mounts.change_root(str(root))


class _Builder:
    """Mounts one part after the other."""

    def __init__(self, folder: Path, is_user: bool) -> None:
        self._folder = folder
        self._is_user = is_user
        self._preserver = Preserver()
        self._count = 0

    def add(self, part: ViewPart) -> None:
        target = self._target(part.path)
        if not _is_folder(target):
            return  # a mount that another one covers, or that this user may not see
        if part.how == "pass":
            mounts.bind(part.path, str(target))
        elif part.how == "overlay":
            mounts.overlay(part.path, self._new("upper"), str(target), self._is_user)
        else:
            level = self._new("level")
            foreign = self._preserver.copy_level(part.path, level, str(self._folder))
            mounts.overlay(str(level), self._new("upper"), str(target), self._is_user)
            for file in foreign:
                self._target(file).touch()
                mounts.bind(file, str(self._target(file)))

    def add_frozen(self, path: str, fixed: Sequence[str]) -> Sequence[str]:
        """Mount a frozen folder; return the folders in it that are to be mounted live."""
        kept = survey(path, fixed, str(self._folder))
        if not kept.frozen:
            return ()
        copy = self._new("frozen")
        kept = self._preserver.freeze(kept, path, copy, str(self._folder))
        if not kept.frozen:
            return ()
        mounts.overlay(str(copy), self._new("upper"), str(self._target(path)), self._is_user)
        return kept.live

    def keep_socket(self, path: str) -> None:
        """Pass a socket through: in an overlay it is another one, to which nobody listens."""
        target = self._target(path)
        if target.is_socket():
            mounts.bind(path, str(target))

    def hide(self, path: str) -> None:
        """Show an empty folder in place of our own."""
        if _is_folder(self._target(path)):
            mounts.bind(str(self._new("empty")), str(self._target(path)))

    def _target(self, path: str) -> Path:
        return self._folder / "root" / path.lstrip("/")

    def _new(self, kind: str) -> Path:
        self._count += 1
        made = self._folder / f"{kind}-{self._count}"
        made.mkdir()
        return made


def _sockets(folder: str) -> list[str]:
    """Return sockets of other programs (display, key agent, database) in a folder and its subfolders."""
    found: list[str] = []
    for place in itertools.islice(
        (folder, *(f"{folder}/{name}" for name in _subfolders(folder) or ())), _MOST_SEARCHED
    ):
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            found += [entry.path for entry in entries if _is_socket(entry)]
    return found[:_MOST_SOCKETS]


def _is_socket(entry: os.DirEntry[str]) -> bool:
    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.is_symlink():
        return False
    return stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)


def _is_folder(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_dir()
    return False


def _subfolders(path: str) -> list[str] | None:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return None
