"""Where the kernel gives no private view (``private/``): Python's own calls write to a worker's scratch folder.

A script that saves a checkpoint and loads it later works on every worker, on one machine or several, and the files that
remain were written once, by worker 0. The redirection covers ``open``, ``os``, ``pathlib``, ``shutil``, ``tarfile``,
``tempfile`` and ``torch.save``. A library that opens files in C or Rust (HDF5, SQLite) is not redirected, and neither
are other programs.
"""

# pathlib itself is redirected here, so this file must not use it.
# ruff: noqa: PTH100, PTH118, PTH120

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pathlib
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from poseidon.auto.private.outline import is_inside
from poseidon.following.patches import Patches

_SYSTEM = ("/dev", "/proc", "/sys", "/run")

_ONE_PATH_READ = tuple(
    name for name in ("stat", "lstat", "access", "readlink", "statvfs", "listxattr", "getxattr") if hasattr(os, name)
)
_ONE_PATH_WRITTEN = tuple(
    name for name in ("utime", "chmod", "chown", "truncate", "setxattr", "removexattr") if hasattr(os, name)
)
_REDIRECTED = (
    *(*_ONE_PATH_READ, *_ONE_PATH_WRITTEN, "mkdir", "remove", "unlink", "rmdir", "rename", "replace"),
    *("listdir", "scandir", "link", "symlink", "open"),
)
_SYSTEM_MODULES = ("posix", "_io", "importlib._bootstrap_external", "_frozen_importlib_external", __name__)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Overlay:
    """A view of the file system in which writes go to ``scratch`` and shadow the real files."""

    def __init__(self, scratch: Path, started: float | None = None) -> None:
        self._scratch = os.path.realpath(scratch)
        self._gone: set[str] = set()
        """Paths that the script has removed or found missing: files that worker 0 writes there later stay hidden."""
        self._started = time.time() if started is None else started
        # What was installed a moment before the job is not worker 0's, and modules are imported late, too.
        installed = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
        self._left_alone = (*_SYSTEM, *installed, self._scratch, str(Path("~/.cache").expanduser()))
        self._temporary = os.path.realpath(tempfile.gettempdir())
        self._home = str(Path.cwd())
        self._stat, self._mkdir, self._scandir = os.stat, os.mkdir, os.scandir

    def install(self, patches: Patches) -> None:
        """Install the redirections."""
        before = {id(getattr(os, name)): name for name in _REDIRECTED}
        plain_open = builtins.open
        patches.wrap(builtins, "open", self._open)
        patches.replace(io, "open", builtins.open)
        for name in _ONE_PATH_READ:
            self._wrap_os(patches, name, self._reading_first)
        for name in _ONE_PATH_WRITTEN:
            self._wrap_os(patches, name, self._changing_first)
        for name, around in (
            ("mkdir", self._make_folder),
            ("remove", self._remove),
            ("unlink", self._remove),
            ("rmdir", self._remove),
            ("rename", self._move),
            ("replace", self._move),
            ("link", self._link),
            ("symlink", self._link_by_name),
            ("open", self._open_descriptor),
            ("listdir", self._list),
            ("scandir", self._scan),
        ):
            self._wrap_os(patches, name, around)
        patches.wrap(torch, "save", self._save)
        patches.wrap(torch, "load", self._load)
        # By descriptors of folders nothing can be redirected, by paths it can.
        if "_use_fd_functions" in shutil.__dict__:
            patches.replace(shutil, "_use_fd_functions", False)
        self._replace_copies(
            patches, {id(plain_open): builtins.open} | {key: getattr(os, before[key]) for key in before}
        )

    def covers(self, path: str) -> bool:
        """Whether writes to an absolute path are redirected: not for caches, devices and temporary files."""
        if any(is_inside(path, folder) for folder in self._left_alone):
            return False
        if not is_inside(path, self._temporary):
            return True
        return is_inside(self._home, self._temporary) and is_inside(path, self._home)

    def reading(self, path: Any) -> Any:
        """Return the path to read from."""
        absolute = _absolute(path)
        if absolute is None or not self.covers(absolute):
            return path
        own = self._own(absolute)
        if self._exists(own) or self._is_hidden(absolute):
            return own
        if not self._exists(absolute):
            self._gone.add(absolute)
        return path

    def writing(self, path: Any, keeps: bool = False) -> Any:
        """Return the path to write to; ``keeps``: the present content is changed, not replaced."""
        absolute = _absolute(path)
        if absolute is None or not self.covers(absolute):
            return path
        own = self._own(absolute)
        seen = self.reading(absolute)
        folder = os.path.dirname(absolute)
        if self._is_folder(self.reading(folder)):
            self._make_folders(os.path.dirname(own))
        if keeps and seen != own and self._exists(seen) and not self._is_folder(seen):
            shutil.copy2(seen, own)
        return own

    # Replacements.

    def _open(self, original: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("opener") is not None or not set(mode) & set("wax+"):
            return original(file if kwargs.get("opener") else self.reading(file), mode, *args, **kwargs)
        if "x" in mode and self._exists(self.reading(file)):
            raise FileExistsError(17, "File exists", str(file))
        return original(self.writing(file, keeps="w" not in mode), mode, *args, **kwargs)

    def _save(self, original: Callable[..., Any], thing: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        original(thing, self.writing(f), *args, **kwargs)

    def _load(self, original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self.reading(f), *args, **kwargs)

    def _reading_first(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self.reading(path), *args, **kwargs)

    def _changing_first(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self.writing(path, keeps=True), *args, **kwargs)

    def _make_folder(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        seen = self.reading(path)
        if self._exists(seen) and not self._is_new_folder(seen):
            raise FileExistsError(17, "File exists", str(path))
        original(self.writing(path), *args, **kwargs)

    def _remove(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        absolute = _absolute(path)
        if absolute is None or not self.covers(absolute) or kwargs.get("dir_fd") is not None:
            original(path, *args, **kwargs)
            return
        own = self._own(absolute)
        if self._exists(own) or self._is_hidden(absolute):
            original(own, *args, **kwargs)
        elif not self._exists(absolute):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        self._gone.add(absolute)

    def _move(self, original: Callable[..., Any], source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        absolute = _absolute(source)
        if absolute is None or not self.covers(absolute):
            # From outside the scratch folder into it; between disks `shutil.move` copies then.
            original(source, self.writing(target), *args, **kwargs)
            return
        seen, own = self.reading(source), self.writing(target)
        if self._is_folder(seen):
            # Some of its files may be real ones, which stay.
            if own == target:
                shutil.copytree(source, target, symlinks=True)
            else:
                self._copy_folder(absolute, own)
            shutil.rmtree(source)
        elif seen == self._own(absolute):
            original(seen, own, *args, **kwargs)
        else:
            shutil.copy2(seen, own)
        self._gone.add(absolute)

    def _link(self, original: Callable[..., Any], source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        own = self.writing(target)
        if self._exists(self.reading(target)):
            raise FileExistsError(17, "File exists", str(target))
        if own == target:
            original(self.reading(source), target, *args, **kwargs)
        else:
            # A copy: what is written through a link would change the real file.
            shutil.copy2(self.reading(source), own)

    def _link_by_name(self, original: Callable[..., Any], source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        own = self.writing(target)
        absolute = _absolute(target)
        if own != target and absolute is not None:
            if self._exists(self.reading(target)):
                raise FileExistsError(17, "File exists", str(target))
            # A relative name would lead to the scratch folder, where only this worker's files are.
            source = self.reading(os.path.join(os.path.dirname(absolute), os.fsdecode(source)))
        original(source, own, *args, **kwargs)

    def _open_descriptor(self, original: Callable[..., Any], path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if kwargs.get("dir_fd") is not None:
            return int(original(path, flags, *args, **kwargs))
        if not flags & _WRITING or flags & getattr(os, "O_TMPFILE", 0) == getattr(os, "O_TMPFILE", -1):
            return int(original(self.reading(path), flags, *args, **kwargs))
        if flags & os.O_EXCL and self._exists(self.reading(path)):
            raise FileExistsError(17, "File exists", str(path))
        return int(original(self.writing(path, keeps=not flags & os.O_TRUNC), flags, *args, **kwargs))

    def _list(self, original: Callable[..., Any], path: Any = ".") -> list[Any]:
        absolute = _absolute(path)
        if absolute is None or not self.covers(absolute):
            return list(original(path))
        return [entry.name for entry in self._entries(absolute)]

    def _scan(self, original: Callable[..., Any], path: Any = ".") -> Any:
        absolute = _absolute(path)
        if absolute is None or not self.covers(absolute):
            return original(path)
        shown = os.fsdecode(path)
        return _Scan([_ScanEntry(entry, os.path.join(shown, entry.name)) for entry in self._entries(absolute)])

    # Inside.

    def _wrap_os(self, patches: Patches, name: str, around: Callable[..., Any]) -> None:
        patches.wrap(os, name, around)
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 keeps its own functions there
        if accessor is not None and name in accessor.__dict__:
            patches.replace(accessor, name, staticmethod(getattr(os, name)))

    def _replace_copies(self, patches: Patches, redirected: dict[int, Any]) -> None:
        """Replace the functions in modules that have imported them by name, as ``tarfile`` and ``lzma`` do."""
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or module in (os, io, builtins):
                continue
            for name, value in list(names.items()):
                if id(value) in redirected and module.__name__ not in _SYSTEM_MODULES:
                    patches.replace(module, name, redirected[id(value)])

    def _copy_folder(self, absolute: str, own: str) -> None:
        self._make_folders(own)
        for entry in self._entries(absolute):
            if entry.is_dir(follow_symlinks=False):
                self._copy_folder(os.path.join(absolute, entry.name), os.path.join(own, entry.name))
            else:
                shutil.copy2(entry.path, os.path.join(own, entry.name), follow_symlinks=False)

    def _entries(self, absolute: str) -> list[Any]:
        scan, own = self._scandir, self._own(absolute)
        has_own, is_hidden = self._exists(own), self._is_hidden(absolute)
        found = list(scan(own)) if has_own else []
        if not is_hidden and (self._exists(absolute) or not has_own):
            names = {entry.name for entry in found}
            beneath = [entry for entry in scan(absolute) if entry.name not in names]
            found += [entry for entry in beneath if not self._is_hidden(os.path.join(absolute, entry.name))]
        return found

    def _own(self, absolute: str) -> str:
        return self._scratch + absolute

    def _is_hidden(self, absolute: str) -> bool:
        """Whether a file is hidden: removed, or written since the start, which only worker 0 can have done."""
        if absolute in self._gone:
            return True
        try:
            status = self._stat(absolute)
        except OSError:
            return False
        return status.st_mtime > self._started and not _is_folder_mode(status.st_mode)

    def _is_new_folder(self, seen: str) -> bool:
        """Whether worker 0 has probably just created a folder that this worker is about to create."""
        is_own = is_inside(os.path.abspath(seen), self._scratch)
        return not is_own and self._is_folder(seen) and self._stat(seen).st_mtime > self._started

    def _exists(self, path: Any) -> bool:
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._stat(path)
            return True
        return False

    def _is_folder(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            return _is_folder_mode(self._stat(path).st_mode)
        return False

    def _make_folders(self, folder: str) -> None:
        if not self._exists(folder):
            self._make_folders(os.path.dirname(folder))
            self._mkdir(folder)


class _Scan:
    """The result of ``os.scandir``: an iterator that can be closed."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: the entries are in memory."""


class _ScanEntry:
    """An entry of ``os.scandir`` under the path that the script knows, wherever the file is."""

    def __init__(self, entry: os.DirEntry[str], path: str) -> None:
        self._entry = entry
        self.name = entry.name
        self.path = path

    def __fspath__(self) -> str:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


def _absolute(path: Any) -> str | None:
    """Return an absolute path as text, or None for file descriptors, open files and the like."""
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, str | os.PathLike):
        return None
    return os.path.abspath(path)


def _is_folder_mode(mode: int) -> bool:
    return (mode & 0o170000) == 0o040000
