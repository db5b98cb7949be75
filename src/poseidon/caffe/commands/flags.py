"""Caffe's flags in Caffe's spelling: one dash or two, ``--flag value`` or ``--flag=value``, underscores."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from poseidon.errors import ConfigError

_CAFFE: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "solver": (str, "", "the solver's prototxt"),
    "model": (str, "", "the net's prototxt"),
    "snapshot": (str, "", "resume from this .solverstate (or .solverstate.h5)"),
    "weights": (str, "", "start from the parameters in these files, separated by commas"),
    "gpu": (str, "", "GPU numbers separated by commas, or all; default: the solver's choice, or the CPU"),
    "iterations": (int, 50, "number of iterations (default 50)"),
    "phase": (str, "", "TRAIN or TEST"),
    "level": (int, 0, "level of the net's state, for include and exclude rules"),
    "stage": (str, "", "stages of the net's state, separated by commas"),
    "sigint_effect": (str, "stop", "what Ctrl-C does: stop, snapshot or none (default stop)"),
    "sighup_effect": (str, "snapshot", "what SIGHUP does: stop, snapshot or none (default snapshot)"),
    "log_dir": (str, "", "write the log to caffe.INFO in this folder as well"),
}
_LOGGING = ("logtostderr", "alsologtostderr")


def add_caffe_flags(parser: argparse.ArgumentParser, shown: Collection[str]) -> None:
    """Declare all flags of Caffe's one program; only ``shown`` ones take effect and appear in the help."""
    for name, (kind, default, text) in _CAFFE.items():
        help_text = text if name in shown or name == "log_dir" else argparse.SUPPRESS
        parser.add_argument(f"-{name}", f"--{name}", type=kind, default=default, help=help_text)
    for name in _LOGGING:
        add_bool_flag(parser, name, True, argparse.SUPPRESS)


def add_flag(parser: Any, name: str, kind: Callable[[str], Any], default: Any, text: str) -> None:
    """Declare one more flag in the same spelling."""
    parser.add_argument(f"-{name}", f"--{name}", type=kind, default=default, help=text)


def add_bool_flag(parser: Any, name: str, default: bool, text: str) -> None:
    """Declare a flag that is written ``--name``, ``--name=false`` or ``--noname``."""
    parser.add_argument(f"-{name}", f"--{name}", nargs="?", const=True, default=default, type=_to_bool, help=text)
    parser.add_argument(
        f"-no{name}", f"--no{name}", dest=name, action="store_const", const=False, help=argparse.SUPPRESS
    )


def need(value: str, flag: str, purpose: str) -> str:
    """Return a flag's value, or raise :class:`ConfigError` if it was not given."""
    if not value:
        raise ConfigError(f"--{flag} is missing: {purpose}")
    return value


def stages_of(text: str) -> list[str]:
    """Return the stages; as in Caffe, the list holds one empty stage if none are given."""
    return text.split(",")


@contextlib.contextmanager
def on_device(args: argparse.Namespace) -> Iterator[None]:
    """Log as Caffe does and compute on the device of ``--gpu``, for as many ``--iterations`` as there must be."""
    from poseidon.caffe.glog import console
    from poseidon.caffe.training import check_gpus, choose_device, parse_gpus

    if args.iterations < 1:
        raise ConfigError(f"--iterations is {args.iterations}; it must be at least 1")
    gpus = parse_gpus(args.gpu)
    check_gpus(gpus, args.gpu)
    with console(log_dir=args.log_dir or None):
        choose_device(gpus or ())
        yield


def _to_bool(text: str) -> bool:
    if text.lower() in ("true", "t", "1", "yes", "y"):
        return True
    if text.lower() in ("false", "f", "0", "no", "n"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
