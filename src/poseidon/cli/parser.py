"""The parser of every command: a word that it does not know is answered with the one that is probably meant."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)


class CommandParser(argparse.ArgumentParser):
    """Argparse's own, but for the last line of an error, and for what follows an option whose file may be left out."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; where ``--json`` may have a file, the word behind it may be something else: ``plan --json vgg19``."""
        words = list(sys.argv[1:] if args is None else args)
        has_file = any("--json" in action.option_strings and action.nargs == "?" for action in self._actions)
        return super().parse_known_args(part_json(words) if has_file else words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print usage and the error, with what was probably meant, and exit with status 2."""
        super().error(message + suggest(message, list(_options(self))))


def part_json(words: Sequence[str]) -> list[str]:
    """Return a command line on which ``--json`` takes the next word only if that is called like such a file. Pure."""
    following = [*words, ""][1:]
    return [
        "--json=-" if word == "--json" and not after.endswith(".json") else word
        for word, after in zip(words, following, strict=True)
    ]


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
