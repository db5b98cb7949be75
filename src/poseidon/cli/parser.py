"""The parser of every command: a word that it does not know is answered with the one that is probably meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator
from typing import NoReturn

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)


class CommandParser(argparse.ArgumentParser):
    """Argparse's own, but for the last line of an error."""

    def error(self, message: str) -> NoReturn:
        """Print usage and the error, with what was probably meant, and exit with status 2."""
        super().error(message + suggest(message, list(_options(self))))


def suggest(message: str, options: list[str]) -> str:
    """Return what to add to an error of argparse: the nearest known word, or nothing. Pure."""
    if found := _UNKNOWN.search(message):
        pairs = [(word.partition("=")[0], options) for word in found[1].split() if word.startswith("--")]
    elif found := _CHOICE.search(message):
        pairs = [(found[1], re.findall(r"[\w-]+", found[2]))]
    else:
        return ""
    near = [match for word, known in pairs for match in difflib.get_close_matches(word, known, n=1)]
    return f"; did you mean {', '.join(near)}?" if near else ""


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _options(each)
