"""What a private view consists of: which folders are overlaid, which are passed through. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

SYSTEM = ("/dev", "/proc", "/sys", "/run")
"""Devices, processes and sockets: passed through."""
_KERNELS_OWN = ("proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "pstore", "bpf", "configfs")
_PSEUDO = frozenset(
    (*_KERNELS_OWN, "devtmpfs", "devpts", "mqueue", "hugetlbfs", "fusectl", "binfmt_misc", "efivarfs", "nsfs", "autofs")
)
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of ``/proc/self/mountinfo``."""

    point: str
    kind: str
    device: int
    is_read_only: bool

    @property
    def is_passed(self) -> bool:
        """Whether nothing can be written there, or nothing that stays."""
        return self.is_read_only or self.kind in _PSEUDO


@dataclass(frozen=True)
class ViewPart:
    """One folder of the view, and how it comes about.

    ``overlay``: the real folder below, private writes above. ``pass``: the real folder with all mounts in it.
    ``level``: a copy of the real folder without what its subfolders hold, and private writes above.
    """

    path: str
    how: Literal["overlay", "pass", "level"]


Listing = Callable[[str], list[str] | None]
"""Returns the names of a folder's subfolders; None if it may not be read."""


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts listed in ``mountinfo``; of several at one point only the last one is visible."""
    found: dict[str, Mount] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        words, kind = before.split(), after.split()[0]
        major, minor = words[2].split(":")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), words[4])
        options = {*words[5].split(","), *after.split()[-1].split(",")}
        found.pop(point, None)
        found[point] = Mount(point, kind, os.makedev(int(major), int(minor)), "ro" in options)
    return list(found.values())


def outline(
    mounts: Iterable[Mount], shared: Collection[str], listing: Listing, is_split: bool, top: str = "/"
) -> list[ViewPart]:
    """Return the parts of the view of ``top``, parents first.

    ``shared`` folders are passed through. With ``is_split`` no folder that contains a mount is overlaid: an ordinary
    user's kernel refuses that, because the overlay would show what the mount covers. Its subfolders then are, each.
    """
    known = {mount.point: mount for mount in mounts}
    passed = {*SYSTEM, *shared}
    parts: list[ViewPart] = []

    def visit(path: str) -> None:
        mount = known.get(path)
        inside = outermost_inside(known, path)
        folders = listing(path) if inside and is_split else []
        if path in passed or folders is None or (mount is not None and mount.is_passed):
            parts.append(ViewPart(path, "pass"))
        elif not folders:
            parts.append(ViewPart(path, "overlay"))
            for point in outermost_inside([*inside, *passed], path):
                visit(point)
        else:
            parts.append(ViewPart(path, "level"))
            for name in folders:
                visit(f"{path.rstrip('/')}/{name}")

    visit(top)
    return parts


def outermost_inside(paths: Iterable[str], folder: str) -> list[str]:
    """Return the paths strictly inside a folder that are in no other of them, sorted."""
    found: list[str] = []
    for path in sorted({path for path in paths if is_inside(path, folder) and path != folder}):
        if not any(is_inside(path, one) for one in found):
            found.append(path)
    return found


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is a folder or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")
