"""``poseidon doctor``: checks whether training would work on these hosts, before a long job finds out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace

from poseidon.doctor.conduct import Examination, ExaminationOptions, examine
from poseidon.doctor.findings import would_train
from poseidon.doctor.ports import parse_ports
from poseidon.doctor.writing import examination_to_json, format_examination
from poseidon.errors import ConfigError
from poseidon.launch.hosts import Host
from poseidon.launch.run import complete_host, read_cluster
from poseidon.launch.run_settings import PREFIX, SETTINGS, resolve

_LONGEST_S = 30.0
_SHARED = ("user", "ssh_port", "identity", "python", "directory", "interface", "master_port")
"""Settings of ``poseidon run`` that determine how a host is reached and what runs there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    group = parser.add_argument_group("where (default: this machine)")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B:2", help="machines, with the number of workers of each after a colon")
    where.add_argument("--hostfile", metavar="F", help="file of `host slots=n` or `id ip port` lines, JSON or TOML")
    where.add_argument("-c", "--cluster", metavar="F", help="JSON or TOML file of hosts and settings")
    how = parser.add_argument_group(f"how, as for `poseidon run` (also from the cluster file or {PREFIX}NAME)")
    for option in (one for one in SETTINGS if one.name in _SHARED):
        how.add_argument(
            option.argument, dest=option.name, type=option.notation.read_argument, default=None, help=option.help
        )
    parser.add_argument("--ports", default="29500", help="where workers may meet, such as 29500-29510 (default: 29500)")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a stream is measured (default: 0.5)")
    parser.add_argument("--streams", type=int, default=4, help="streams of the second measurement (default: 4)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a host has to answer (default: 60)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors for the exit status")


def run(args: argparse.Namespace) -> int:
    """Examine, print, and return 0 only if training would work."""
    options = make_options(args)
    examination = examine(find_hosts(args), options, tell=_tell)
    _tell("")
    if args.json:
        print(json.dumps(examination_to_json(examination), indent=1))
    else:
        print(format_examination(examination))
    return exit_status(examination, args.strict)


def exit_status(examination: Examination, is_strict: bool) -> int:
    """Return 0 if training would work; if strict, only if there are no findings at all."""
    is_fine = not examination.findings if is_strict else would_train(examination.findings)
    return 0 if is_fine else 1


def make_options(args: argparse.Namespace) -> ExaminationOptions:
    """Return what to try, checked. Pure."""
    if not 0 < args.seconds <= _LONGEST_S:
        raise ConfigError(f"--seconds is {args.seconds:g}; it takes more than 0 and at most {_LONGEST_S:g}")
    if not 1 <= args.streams <= 64:
        raise ConfigError(f"--streams is {args.streams}; it takes 1 to 64")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout is {args.timeout:g}; it takes more than 0")
    return ExaminationOptions(parse_ports(args.ports), args.seconds, args.streams, args.timeout)


def find_hosts(args: argparse.Namespace) -> tuple[Host, ...]:
    """Return the hosts as ``poseidon run`` would reach them with the same options, file and environment."""
    cluster = read_cluster(args)
    chosen = resolve(vars(args), cluster.settings, args.cluster or "", os.environ)
    values = {name: one.value for name, one in chosen.items()}
    first, *others = (complete_host(host, values) for host in cluster.hosts)
    return (replace(first, service_port=first.service_port or values["master_port"]), *others)


def _tell(text: str) -> None:
    """Show the current activity, on a terminal only, on one line that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
