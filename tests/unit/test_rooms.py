"""The house's plan in the documentation is the one that is enforced."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def load():
    spec = importlib.util.spec_from_file_location("rooms", ROOT / "scripts" / "rooms.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documentation_draws_the_rooms_as_they_are() -> None:
    rooms = load()
    assert rooms.draw() in rooms.PAGE.read_text(), "run python scripts/rooms.py --write"


def test_every_room_is_in_the_table_and_imports_only_from_rooms_below() -> None:
    rooms = load()
    layers = rooms.layers()
    depth = {room: level for level, layer in enumerate(layers) for room in layer}
    present = {path.stem for path in rooms.SOURCES.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert present - {"__init__", "__pycache__", "py"} == set(depth)
    upward = [(room, other) for room in depth for other in rooms.imports_of(room) if depth[other] <= depth[room]]
    assert upward == []
