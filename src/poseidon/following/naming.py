"""What a script calls an object and who is using it, for the report and for options that name a loader."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_NOT_THE_SCRIPT = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_LIBRARIES = ("tensorflow.", "keras.")
_PROGRESS_BARS = ("tqdm", "rich", "alive_progress", "progressbar", "progress")


def find_name(wanted: Any) -> str | None:
    """Return the variable or attribute that holds an object in the calling code.

    The outermost name wins: a function's ``loader`` is ``train_loader`` in its caller.
    """
    name: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_library(frame):
            name = _name_in(frame, wanted) or name
        frame = frame.f_back
    return name


def find_place() -> tuple[tuple[str, int], ...]:
    """Return the lines that are being executed in the calling code, outermost last."""
    lines: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_library(frame):
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def is_called_by_keras() -> bool:
    """Return whether Keras is calling: it reads data in its own way, and ``poseidon.keras`` deals out fit's data."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if f"{frame.f_globals.get('__name__')}.".startswith(("keras.", "poseidon.keras.")):
            return True
        frame = frame.f_back
    return False


def is_fetched_ahead() -> bool:
    """Return whether it is a library that asks an iterator for its next item, perhaps before the script needs it."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT):
        frame = frame.f_back
    if frame is None:
        return False
    package = str(frame.f_globals.get("__name__", "")).split(".")[0]
    is_installed = any(folder in frame.f_code.co_filename for folder in ("site-packages", "dist-packages"))
    return is_installed and package not in _PROGRESS_BARS


def _is_library(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_filename.startswith(_NOT_THE_SCRIPT) or f"{module}.".startswith(_LIBRARIES)


def _name_in(frame: FrameType, wanted: Any) -> str | None:
    owner = frame.f_locals.get("self")
    attributes = getattr(owner, "__dict__", {})
    for scope in (frame.f_globals, attributes, frame.f_locals):
        for name, value in list(scope.items()):
            if value is wanted and not name.startswith("_"):
                return str(name)
    return None
