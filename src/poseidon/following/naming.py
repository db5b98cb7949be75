"""What does the script call this object, and who is using it? For the report, and for options that name a loader."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_NOT_THE_SCRIPT = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_LIBRARIES = ("tensorflow.", "keras.")


def find_name(wanted: Any) -> str | None:
    """Return the variable or attribute that holds an object in the code that is using it.

    The outermost one: what a function knows as ``loader`` is ``train_loader`` where it was called.
    """
    name: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_library(frame):
            name = _name_in(frame, wanted) or name
        frame = frame.f_back
    return name


def is_called_by_keras() -> bool:
    """Tell whether Keras is at work: it reads data in ways of its own, and fit's are dealt out by poseidon.keras."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if f"{frame.f_globals.get('__name__')}.".startswith(("keras.", "poseidon.keras.")):
            return True
        frame = frame.f_back
    return False


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
