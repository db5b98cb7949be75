"""Checks a job's script before anything starts."""

from __future__ import annotations

import ast
import importlib.util
import tokenize
import warnings
from pathlib import Path

from poseidon.errors import ConfigError


def check_script(path: Path) -> None:
    """Raise :class:`ConfigError` for a script that does not exist or does not compile."""
    if not path.is_file():
        hint = "a directory; use -m for a package" if path.is_dir() else "no such file"
        raise ConfigError(f"there is no script {path} ({hint})")
    try:
        with tokenize.open(path) as stream:
            source = stream.read()
        with warnings.catch_warnings():
            # The script's own warnings are shown when it runs.
            warnings.simplefilter("ignore")
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()
        place = path if error.lineno is None else f"{path}:{error.lineno}"  # bytes that are no text have no line
        raise ConfigError(f"{place}: {error.msg}" + (f": {line}" if line else "")) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the script {path} cannot be read: {error}") from None


def find_imports(path: Path) -> set[str]:
    """Return the top-level packages that a script imports anywhere; none, if it cannot be read here."""
    try:
        with tokenize.open(path) as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(stream.read())
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def check_module(name: str, directory: Path) -> None:
    """Raise :class:`ConfigError` if a module's top-level package cannot be found; imports nothing."""
    top = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"-m {name!r} is not the name of a module")
    is_here = any((directory / place).exists() for place in (top, f"{top}.py"))
    if not is_here and importlib.util.find_spec(top) is None:
        raise ConfigError(f"there is no module {top!r}, neither installed nor in {directory}")
