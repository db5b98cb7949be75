"""Renames inside a private view, which consists of several mounts where the real file system may be one disk."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from poseidon.following.patches import Patches


def move_between_disks(patches: Patches) -> None:
    """Let ``os.rename`` and ``os.replace`` copy what cannot be renamed, as ``mv`` does."""
    for name in ("rename", "replace"):
        patches.wrap(os, name, _move)


def _move(original: Callable[..., None], source: Any, target: Any, **kwargs: Any) -> None:
    try:
        original(source, target, **kwargs)
    except OSError as error:
        if error.errno != errno.EXDEV or any(value is not None for value in kwargs.values()):
            raise
        old, new = Path(os.fsdecode(source)), Path(os.fsdecode(target))
        beside = new.with_name(f".{secrets.token_hex(8)}.tmp")
        if old.is_dir() and not old.is_symlink():
            shutil.copytree(old, beside, symlinks=True)
            original(beside, new)
            shutil.rmtree(old)
        else:
            shutil.copy2(old, beside, follow_symlinks=False)
            original(beside, new)
            old.unlink()
