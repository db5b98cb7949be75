"""``psd_run``: the original Poseidon's launcher for TensorFlow scripts, with its arguments and its JSON.

Translates ``psd_run -c cluster.json -o LOGDIR "python model.py --steps 100"`` to ``poseidon run --auto``. One command
is for all workers; several, separated by commas, are for one worker each.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from poseidon.errors import ConfigError, PoseidonError, unknown_name
from poseidon.launch import run
from poseidon.launch.hosts import ORIGINAL_KEYS, ClusterFile, load_cluster_data, parse_cluster, split_port
from poseidon.launch.places import place_workers
from poseidon.launch.run_settings import resolve

_PYTHON = re.compile(r"python[\d.]*")
_NEXT_COMMAND = re.compile(r"\s*(?:[^\s,'\"]*/)?python[\d.]*\s")
"""Follows a comma that separates commands; other commas belong to a command's arguments."""


@dataclass(frozen=True)
class Command:
    """One worker's command."""

    python: str
    """Path of the interpreter; empty: that of the cluster file or of this process."""
    words: tuple[str, ...]
    """Script, or ``-m`` and a module, and the arguments."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the status of the job."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    try:
        return _start(args.cluster_config, args.out, args.cmd, args.env or ())
    except PoseidonError as error:
        print(f"psd_run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("psd_run: interrupted", file=sys.stderr)
        return 130


def split_commands(text: str) -> list[str]:
    """Return the commands of ``python a.py, python b.py``; commas in quotes or arguments do not separate. Pure."""
    commands, start, quote = [], 0, ""
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "," and (_NEXT_COMMAND.match(text, place + 1) or not text[place + 1 :].strip()):
            commands.append(text[start:place])
            start = place + 1
    if quote:
        raise ConfigError(f"the command {text!r} has an unclosed quote {quote}")
    return [*commands, text[start:]]


def read_command(text: str) -> Command:
    """Parse a command. Pure."""
    words = shlex.split(text)
    if not words or not _PYTHON.fullmatch(PurePath(words[0]).name):
        raise ConfigError(
            f'command {text.strip()!r} does not begin with python; write for example "python model.py --steps 100", '
            "and commas only between the commands of different workers"
        )
    python = words[0] if "/" in words[0] else ""
    rest = words[1:]
    while rest and rest[0] == "-u":  # workers' output is unbuffered anyway
        rest = rest[1:]
    if not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) == 1)):
        raise ConfigError(f"command {text.strip()!r} names no script; write python SCRIPT or python -m MODULE")
    return Command(python, tuple(rest))


def read_commands(text: str, nodes: Sequence[str]) -> list[Command]:
    """Return the command of each worker node. Pure."""
    commands = [read_command(part) for part in split_commands(text)]
    if len(commands) not in (1, len(nodes)):
        raise ConfigError(
            f"there are {len(commands)} commands for {len(nodes)} worker nodes; give one for all, or one for each"
        )
    pythons = sorted({command.python for command in commands})
    if len(pythons) > 1:
        raise ConfigError(f"the commands name different interpreters ({', '.join(pythons)}); all workers use one")
    return commands * len(nodes) if len(commands) == 1 else commands


def order_by_rank(commands: Sequence[Command], nodes: Sequence[str], cluster: ClusterFile) -> list[Command]:
    """Return the commands by rank; ranks may count the nodes in another order than the file. Pure."""
    waiting: dict[str, list[Command]] = {}
    for node, command in zip(nodes, commands, strict=True):
        waiting.setdefault(split_port(node)[0], []).append(command)
    return [waiting[place.host].pop(0) for place in place_workers(cluster.hosts)]


def explain(data: dict[str, Any]) -> list[str]:
    """Return a line for every key of the file that has no counterpart here. Pure."""
    lines = []
    if data.get("server_nodes"):
        lines.append("server_nodes: not needed, the workers' machines serve the parameters")
    master = split_port(str(data.get("master_node") or ""))[0]
    workers = [split_port(node)[0] for node in data["worker_nodes"]]
    if master and master not in workers:
        lines.append(f"master_node: {master} is not a worker, so the workers meet on {workers[0]}")
    return lines


def check_keys(data: Any, source: str) -> dict[str, Any]:
    """Return the content of a cluster file, checked to have the original's form."""
    if not isinstance(data, dict) or "worker_nodes" not in data:
        raise ConfigError(f'{source} has no worker_nodes; write {{"worker_nodes": ["192.0.2.1", "192.0.2.2"]}}')
    for key in data:
        if key not in ORIGINAL_KEYS:
            raise unknown_name(f"key in {source}", key, ORIGINAL_KEYS)
    servers = data.get("server_nodes", [])
    if not isinstance(servers, list) or not all(isinstance(node, str) for node in servers):
        raise ConfigError(f"{source}: server_nodes is {servers!r}; it must be a list of addresses")
    for key in ("master_node", "virtualenv", "username", "pem_file"):
        if not isinstance(data.get(key, ""), str):
            raise ConfigError(f"{source}: {key} is {data[key]!r}; it must be a text")
    return data


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="psd_run",
        description="Run a TensorFlow, Keras or PyTorch script that was written for one device on a cluster.",
        epilog='One command is for all workers; several are for one each: "python a.py","python b.py"',
    )
    parser.add_argument(
        "-c",
        "--cluster_config",
        "--cluster-config",
        required=True,
        metavar="CLUSTER_CONFIG",
        help="JSON file: worker_nodes and, if needed, username, pem_file, virtualenv, master_node, server_nodes",
    )
    parser.add_argument("-o", "--out", metavar="OUTPUT_FOLDER", help="folder for a log file per worker")
    parser.add_argument("--env", action="append", metavar="NAME[=VALUE]", help="a variable for all workers; repeatable")
    parser.add_argument("cmd", help='what to run, in quotes: "python model.py --max_steps 1000"')
    return parser


def _start(path: str, out: str | None, text: str, env: Sequence[str]) -> int:
    data = check_keys(load_cluster_data(path), path)
    cluster = parse_cluster(data, path)
    nodes = data["worker_nodes"]
    commands = order_by_rank(read_commands(text, nodes), nodes, cluster)
    log_dir = out or time.strftime("poseidon_log_%Y%m%d-%H%M%S")
    parsed = [_as_run_arguments(command, log_dir, env) for command in commands]
    programs = [run.read_program(args) for args in parsed]
    chosen = resolve(vars(parsed[0]), cluster.settings, path, os.environ)
    # For every program, because this checks it.
    made = {program: run.make_settings(parsed[0], program, cluster, chosen) for program in programs}
    settings = made[programs[0]]
    if len(made) > 1:
        each = tuple(program.argv for program in programs)
        is_same_script = len({program.script for program in made}) == 1
        settings = replace(settings, each=each, script=settings.script if is_same_script else None)
    for line in explain(data):
        print(f"psd_run: {line}", file=sys.stderr)
    return run.run_job(settings, chosen, parsed[0], programs[0])


def _as_run_arguments(command: Command, log_dir: str, env: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    python = ["--python", command.python] if command.python else []
    variables = [word for variable in env for word in ("--env", variable)]
    return parser.parse_args(["--auto", "--quiet", "--log-dir", log_dir, *variables, *python, *command.words])


if __name__ == "__main__":
    sys.exit(main())
