from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import poseidon
from poseidon.errors import ConfigError
from poseidon.job.settings import (
    FOREIGN,
    NUMBER,
    SWITCH,
    TEXT,
    VARIABLES,
    WHOLE,
    WORDS,
    Notation,
    Variable,
    check_least,
)

ROOT = Path(__file__).parents[3]
SOURCES = Path(poseidon.__file__).parent
FAMILIES = ("POSEIDON_WIRE_", "POSEIDON_RUN_", "POSEIDON_")
"""Beginnings of names, used where a whole family is meant."""


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("settings_script", ROOT / "scripts" / "settings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def read(place: str) -> str:
    return (SOURCES / place).read_text()


def test_every_variable_in_the_code_is_declared() -> None:
    named = {name for path in SOURCES.rglob("*.py") for name in re.findall(r"POSEIDON_[A-Z_]*", path.read_text())}
    assert named - {variable.name for variable in script.declared()} - set(FAMILIES) == set()


def test_every_declared_variable_is_used_where_it_says() -> None:
    for variable in VARIABLES:
        constant = variable.name.removeprefix("POSEIDON_")
        assert re.search(rf"{variable.name}\b|\b{constant}\b", read(variable.place)), variable
    for foreign in FOREIGN:
        for name in foreign.names:
            assert f'"{name}"' in read(foreign.place), name


def test_no_variable_is_declared_twice() -> None:
    names = [variable.name for variable in script.declared()]
    assert sorted(set(names)) == sorted(names)


def test_the_page_lists_what_is_declared() -> None:
    assert script.draw() in script.PAGE.read_text(), "run python scripts/settings.py --write"


@pytest.mark.parametrize(
    ("notation", "text", "value"),
    [
        (TEXT, "a b", "a b"),
        (WHOLE, " 7", 7),
        (NUMBER, "2.5", 2.5),
        (SWITCH, "Yes", True),
        (SWITCH, "0", False),
        (WORDS, "-F 'my config'", ("-F", "my config")),
    ],
)
def test_a_variable_is_read_as_it_is_written(notation: Notation[object], text: str, value: object) -> None:
    variable: Variable[object] = Variable("POSEIDON_X", notation, None, "", "")
    assert variable.read({"POSEIDON_X": text}) == value
    assert variable.read({}) is None


@pytest.mark.parametrize(
    ("notation", "value", "expected"),
    [
        (WHOLE, "1.5", "a whole number"),
        (WHOLE, "", "a whole number"),
        (WHOLE, 1.5, "a whole number"),
        (WHOLE, True, "a whole number"),
        (NUMBER, "fast", "a number"),
        (NUMBER, "nan", "a number"),
        (NUMBER, "inf", "a number"),
        (NUMBER, None, "a number"),
        (TEXT, ["a"], "a text"),
        (SWITCH, "maybe", "1 or 0"),
        (WORDS, "'", "words, quoted as in a shell"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_seen_and_expected(
    notation: Notation[object], value: object, expected: str
) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(f"environment variable X is {value!r}, expected {expected}")):
        notation.read(value, "environment variable X")


def test_a_value_has_a_least() -> None:
    check_least(1, 1, "x")
    check_least(None, 1, "x")
    check_least(-5, None, "x")
    with pytest.raises(ConfigError, match=r"x is 0\.5, expected at least 1"):
        check_least(0.5, 1, "x")
