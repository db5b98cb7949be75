"""The rooms of the house, drawn from the table that holds imports to their order.

``pyproject.toml`` has the layers (``[tool.importlinter]``), each room's own docstring says what it is for. This prints
the diagram and the table of ``docs/architecture.md``; ``--write`` puts them there. A test compares the two.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "poseidon"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: made by scripts/rooms.py -->", "<!-- end of rooms -->"


def layers() -> list[list[str]]:
    """Return the rooms, highest first; rooms of one layer do not import each other."""
    # By hand: Python 3.10 has no TOML reader.
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^layers = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    return [line.strip().strip('",').split(" | ") for line in block[1].splitlines()]


def files_of(room: str) -> list[Path]:
    """Return a room's modules."""
    folder = SOURCES / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def purpose(room: str) -> str:
    """Return the first line of a room's docstring."""
    path = SOURCES / room / "__init__.py"
    text = ast.get_docstring(ast.parse((path if path.exists() else path.parent.with_suffix(".py")).read_text()))
    assert text is not None
    return text.splitlines()[0].rstrip(".").replace("``", "`")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, those in functions and branches too; expressions hold no imports."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for each in getattr(node, field, ()):
            yield each
            yield from statements(each)


@functools.cache
def imports_of(room: str) -> set[str]:
    """Return the rooms that a room imports anything from."""
    found = set()
    for path in files_of(room):
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("poseidon."):
                found.add(node.module.split(".")[1])
            elif isinstance(node, ast.ImportFrom) and node.module == "poseidon":
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                found.update(a.name.split(".")[1] for a in node.names if a.name.startswith("poseidon."))
    known = {each for layer in layers() for each in layer}
    return (found & known) - {room}


def nearest(rooms: list[list[str]]) -> Iterator[tuple[str, str]]:
    """Yield the imports that do not follow from others: an arrow for each keeps the diagram readable."""
    imports = {room: imports_of(room) for layer in rooms for room in layer}
    basic = {"errors", "version", "units", "files", "job"}

    def reaches(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for room in imports[stack.pop()] - seen:
                seen.add(room)
                stack.append(room)
        return seen

    for room, direct in imports.items():
        indirect = set().union(*(reaches(other) for other in direct))
        for other in sorted(direct - indirect - basic):
            yield room, other


def draw() -> str:
    """Return the diagram and the table."""
    rooms = layers()
    lines = ["```mermaid", "flowchart TB"]
    lines += [f'    {room}["{room}"]' for layer in rooms for room in layer if room not in ("errors", "version")]
    lines += [f"    {room} --> {other}" for room, other in nearest(rooms)]
    lines += ["```", "", "| room | what it is for |", "|---|---|"]
    for layer in rooms:
        for room in layer:
            name = f"{room}/" if (SOURCES / room).is_dir() else f"{room}.py"
            lines.append(f"| `{name}` | {purpose(room)} |")
    return "\n".join([BEGIN, *lines, END])


def main(arguments: list[str]) -> None:
    """Print or write."""
    if arguments == ["--write"]:
        text = PAGE.read_text()
        start, end = text.index(BEGIN), text.index(END) + len(END)
        PAGE.write_text(text[:start] + draw() + text[end:])
    else:
        print(draw())


if __name__ == "__main__":
    main(sys.argv[1:])
