"""``poseidon page``: shows a run, running or finished, in a browser."""

from __future__ import annotations

import argparse
import sys

from poseidon.observe.folder import find_run
from poseidon.observe.page.server import PageServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", nargs="?", help="the run's folder, or its name below runs/; default: the newest")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at; default: this machine only")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    server = PageServer(find_run(args.run), args.host, args.port)
    print(f"poseidon page: {server.folder} is at {server.url} (Ctrl-C ends)", file=sys.stderr, flush=True)
    server.wait()
    server.close()
    return 0
