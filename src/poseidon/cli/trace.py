"""``poseidon trace``: where a run's trace is, or a copy of it, for ui.perfetto.dev."""

from __future__ import annotations

import argparse
from pathlib import Path

from poseidon import files
from poseidon.errors import ConfigError
from poseidon.observe.folder import TRACE, find_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", nargs="?", help="the run's folder, or its name below runs/; default: the newest")
    parser.add_argument("-o", "--output", type=Path, metavar="F", help="write a copy of the trace here")


def run(args: argparse.Namespace) -> int:
    """Find the trace."""
    folder = find_run(args.run)
    path = folder / TRACE
    if not path.exists():
        raise ConfigError(
            f"{folder} has no trace: start the job with `poseidon run --trace 100:110` to record steps 100 to 109, "
            "and let it come that far and end"
        )
    if args.output is not None:
        files.write_bytes(args.output, files.read_bytes(path, "trace"), "trace")
        path = args.output
    print(path)
    return 0
