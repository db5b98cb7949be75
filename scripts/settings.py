"""The tables of ``docs/settings.md``, from the declarations in the code.

This prints them; ``--write`` puts them into the page. A test compares the two.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from poseidon.job.settings import FOREIGN, VARIABLES, Variable
from poseidon.launch.hosts import ORIGINAL_KEYS, Host
from poseidon.launch.run_settings import FROM_HOSTS, SETTINGS
from poseidon.wire.settings import WireSettings, variable_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
BEGIN, END = "<!-- settings: made by scripts/settings.py -->", "<!-- end of settings -->"


def draw() -> str:
    """Return the tables."""
    return "\n".join([BEGIN, *_variables(), *_wire(), *_run(), *_hosts(), *_internal(), *_foreign(), END])


def declared() -> list[Variable[Any]]:
    """Return every variable of Poseidon's own, the families included."""
    return [*VARIABLES, *map(variable_of, fields(WireSettings)), *(option.variable for option in SETTINGS)]


def _variables() -> Iterable[str]:
    rows = [_row(each, each.purpose) for each in VARIABLES if not each.is_internal]
    return "## Environment variables", "", *_table(("variable", "value", "default", "what it does", "read in"), rows)


def _wire() -> Iterable[str]:
    purposes = _field_docs(WireSettings)
    rows = [_row(variable_of(each), purposes[each.name])[:4] for each in fields(WireSettings)]
    return (
        "## The wire",
        "",
        "These are the fields of `WireSettings` (`poseidon/wire/settings.py`), which `poseidon.ps.connect(settings=)`",
        "also takes. Encryption must be equal on all workers; a job that encrypts does so everywhere",
        "([security](../SECURITY.md)). An unknown `POSEIDON_WIRE_` variable is an error. Unless set, `ip` or",
        "`interface`, `send_buffer_bytes` and `balance` are chosen to suit the job's network.",
        "",
        *_table(("variable", "value", "default", "what it does"), rows),
    )


def _run() -> Iterable[str]:
    rows = []
    for each in SETTINGS:
        key = "in `hosts`" if each.name in FROM_HOSTS else f"`{each.name}`"
        rows.append((f"`{each.argument}`", key, f"`{each.variable.name}`", each.notation.expected, each.help))
    return (
        "## `poseidon run` and `poseidon doctor`",
        "",
        *_table(("argument", "cluster file", "variable", "value", "what it does"), rows),
    )


def _hosts() -> Iterable[str]:
    purposes = _field_docs(Host)
    rows = [(f"`{each.name}`", purposes[each.name]) for each in fields(Host)]
    return (
        "## Hosts in a cluster file or host file",
        "",
        *_table(("key", "what it does"), rows),
        f"The original Poseidon's cluster file is understood too: {', '.join(f'`{key}`' for key in ORIGINAL_KEYS)}.",
        "",
    )


def _internal() -> Iterable[str]:
    rows = [(f"`{each.name}`", each.purpose, f"`{each.place}`") for each in VARIABLES if each.is_internal]
    return (
        "## Set by Poseidon for its own processes",
        "",
        *_table(("variable", "what it does", "read in"), rows),
    )


def _foreign() -> Iterable[str]:
    rows = [(", ".join(f"`{name}`" for name in each.names), each.purpose, f"`{each.place}`") for each in FOREIGN]
    return "## Variables of other tools", "", *_table(("variables", "what they tell", "read in"), rows)


def _row(variable: Variable[Any], purpose: str) -> tuple[str, ...]:
    value, default = variable.notation.expected, variable.default
    shown = str(default) if isinstance(default, str) else "" if default in (None, ()) else f"{default:.10g}"
    return f"`{variable.name}`", value, shown, purpose, f"`{variable.place}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _field_docs(cls: type) -> dict[str, str]:
    """Return the text beneath each field of a dataclass, as one line."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(below, ast.Expr), f"{field.target.id} has no text beneath it"
            assert isinstance(below.value, ast.Constant)
            found[field.target.id] = " ".join(str(below.value.value).replace("``", "`").split())
    return found


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
