"""``poseidon doctor``: would training work on these hosts? Asked before a long job rather than found out in it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from poseidon.errors import ConfigError
from poseidon.launch.doctor.asking import here
from poseidon.launch.doctor.conduct import Examination, Options, examine
from poseidon.launch.doctor.findings import would_train
from poseidon.launch.doctor.ports import parse_ports
from poseidon.launch.doctor.report import examination_to_json, format_examination
from poseidon.launch.hosts import Host, parse_hosts, read_cluster_file, read_hostfile

_LONGEST_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hosts", metavar="A,B:2", help="hosts with their numbers of workers (default: this machine)")
    hosts.add_argument("--hostfile", type=Path, metavar="FILE", help="read them from a file of `host slots=n` lines")
    hosts.add_argument("-c", "--cluster", type=Path, metavar="FILE", help="read them from a .json or .toml file")
    parser.add_argument("--ports", default="29500", help="where workers may meet, such as 29500-29510 (default: 29500)")
    parser.add_argument("--interface", default="", help="interface that carries the job's traffic (default: found)")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a stream is measured (default: 0.5)")
    parser.add_argument("--streams", type=int, default=4, help="streams of the second measurement (default: 4)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a host has to answer (default: 60)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors for the exit status")


def run(args: argparse.Namespace) -> int:
    """Examine, print, and return 0 only if training would work."""
    options = _options(args)
    examination = examine(_hosts(args), options, tell=_tell)
    _tell("")
    if args.json:
        print(json.dumps(examination_to_json(examination), indent=1))
    else:
        print(format_examination(examination))
    return exit_status(examination, args.strict)


def exit_status(examination: Examination, is_strict: bool) -> int:
    """Return 0 if training would work, or, if asked to be strict, if there is nothing to say at all."""
    is_fine = not examination.findings if is_strict else would_train(examination.findings)
    return 0 if is_fine else 1


def _options(args: argparse.Namespace) -> Options:
    if not 0 < args.seconds <= _LONGEST_S:
        raise ConfigError(f"--seconds is {args.seconds:g}; it takes more than 0 and at most {_LONGEST_S:g}")
    if not 1 <= args.streams <= 64:
        raise ConfigError(f"--streams is {args.streams}; it takes 1 to 64")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout is {args.timeout:g}; it takes more than 0")
    return Options(parse_ports(args.ports), args.interface, args.seconds, args.streams, args.timeout)


def _hosts(args: argparse.Namespace) -> tuple[Host, ...]:
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is not None:
        return read_hostfile(args.hostfile)
    return read_cluster_file(args.cluster).hosts if args.cluster is not None else (here(),)


def _tell(text: str) -> None:
    """Show what is being done, on a terminal only, on one line that the next replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
