"""``poseidon quickstart``: LeNet on handwritten digits with several workers, and with one, side by side."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from poseidon.errors import ConfigError, PoseidonError
from poseidon.launch.local import run_workers
from poseidon.planning.table import format_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--workers", type=int, default=4, help="workers on this machine (default: 4)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training images (default: 4)")
    parser.add_argument("--batch", type=int, default=64, help="total batch, divided among the workers (default: 64)")


def run(args: argparse.Namespace) -> int:
    """Train twice and compare."""
    if args.workers < 2:
        raise ConfigError(f"--workers is {args.workers}; it takes at least 2 to compare with 1")
    if args.epochs < 1:
        raise ConfigError(f"--epochs is {args.epochs}; it takes at least 1")
    if args.batch < args.workers or args.batch % args.workers:
        raise ConfigError(f"--batch is {args.batch}, which {args.workers} workers cannot share evenly")
    with tempfile.TemporaryDirectory() as folder:
        many = _train(args, args.workers, Path(folder) / "many.json")
        one = _train(args, 1, Path(folder) / "one.json")
    rows = [
        (
            str(result["workers"]),
            f"{result['batch']}",
            f"{result['accuracy']:.2%}",
            f"{result['loss']:.4f}",
            f"{result['seconds']:.1f} s",
        )
        for result in (many, one)
    ]
    print()
    print(format_table(("workers", "batch of each", "test accuracy", "last loss", "time"), rows))
    print(
        f"\nSame data, same total batch, same result: {args.workers} workers exchanged gradients, stayed identical.\n"
        "(They share this machine's cores, so they are not faster here; on machines of their own they are.)\n"
        "Next: wrap your own model with poseidon.DistributedDataParallel; docs/first-steps.md shows how."
    )
    return 0


def _train(args: argparse.Namespace, workers: int, result: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "poseidon.cli.digits", "--epochs", str(args.epochs), "--result", str(result)]
    command += ["--batch", str(args.batch // workers)]
    print(f"\n== training with {workers} worker{'s' * (workers > 1)} ==", flush=True)
    status = run_workers(command, workers)
    if status != 0:
        raise PoseidonError(f"training with {workers} worker(s) ended with status {status}; its output above says why")
    data: dict[str, float] = json.loads(result.read_text())
    return data
