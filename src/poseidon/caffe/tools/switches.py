"""Boolean flags in gflags' style, for commands that also take positional arguments."""

from __future__ import annotations

import argparse
from typing import Any

_TRUE = ("true", "t", "1", "yes", "y")
_FALSE = ("false", "f", "0", "no", "n")


def add_switch(parser: Any, name: str, text: str) -> None:
    """Declare ``--name``, ``--noname``, ``--name=true`` and ``--name=false``, with one dash or two, off by default.

    A value can only follow an equals sign, so ``--name ROOT`` leaves ROOT alone. argparse cannot express that, so every
    spelling with a value is its own option.
    """
    parser.add_argument(f"-{name}", f"--{name}", dest=name, action="store_true", help=text)
    for spellings, action in (
        ([f"{dash}{name}={word}" for dash in ("-", "--") for word in _TRUE], "store_true"),
        ([f"{dash}{name}={word}" for dash in ("-", "--") for word in _FALSE], "store_false"),
        ([f"-no{name}", f"--no{name}"], "store_false"),
    ):
        parser.add_argument(*spellings, dest=name, action=action, default=False, help=argparse.SUPPRESS)


def add_logging_switches(parser: Any) -> None:
    """Accept the flags of Google's logging library that scripts pass; the log goes to stderr anyway."""
    for name in ("logtostderr", "alsologtostderr"):
        add_switch(parser, name, argparse.SUPPRESS)
