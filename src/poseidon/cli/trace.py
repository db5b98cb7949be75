"""``poseidon trace``: where a run's trace is, or a copy of it, for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.errors import ConfigError
from poseidon.observe.folder import TRACE, find_run
from poseidon.observe.profiles import merge_profiles, rank_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", nargs="?", help="the run's folder, or its name below runs/; default: the newest")
    parser.add_argument("-o", "--output", type=Path, metavar="F", help="write a copy of the trace here")
    parser.add_argument(
        "--profile",
        action="append",
        metavar="[RANK=]F",
        help="add what torch.profiler recorded (export_chrome_trace), to the output; once for each worker",
    )


def run(args: argparse.Namespace) -> int:
    """Find the trace."""
    folder = find_run(args.run)
    path = folder / TRACE
    if not path.exists():
        raise ConfigError(
            f"{folder} has no trace: start the job with `poseidon run --trace 100:110` to record steps 100 to 109, "
            "and let it come that far and end"
        )
    if args.profile:
        if args.output is None:
            raise ConfigError("--profile needs a file for both together: -o FILE")
        profiles = dict(_read_profile(text) for text in args.profile)
        files.write_json(args.output, merge_profiles(_read(path), profiles), "trace", indent=None)
        path = args.output
    elif args.output is not None:
        files.write_bytes(args.output, files.read_bytes(path, "trace"), "trace")
        path = args.output
    print(path)
    return 0


def _read_profile(text: str) -> tuple[int, dict[str, Any]]:
    rank, equals, name = text.partition("=")
    if equals and rank.isdecimal():
        return int(rank), _read(Path(name))
    profile = _read(Path(text))
    return rank_of(profile, text), profile


def _read(path: Path) -> dict[str, Any]:
    data = files.read_bytes(path, "trace")
    try:
        found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, OSError, EOFError, zlib.error, RecursionError) as error:
        raise ConfigError(f"{path} is not a Chrome trace: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ConfigError(f"{path} is not a Chrome trace: it has no traceEvents")
    return found
