"""``poseidon quickstart``: LeNet on several workers and on one, then DDP beside Poseidon on emulated machines."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from poseidon.cli.lab import ended_by_signals
from poseidon.errors import ConfigError, PoseidonError
from poseidon.lab.cluster import Lab, own_environment
from poseidon.lab.job import Job, JobOptions
from poseidon.launch.local import run_workers
from poseidon.planning.table import format_table

RATE = "1gbit"
EMULATION_LIMIT_S = 90.0
"""The emulated job takes about 15 s on two idle cores; a machine that needs far longer is too busy to measure on."""


_NEXT = """
Next: a script of your own. As it is, with no line changed:
    poseidon run --nproc 2 --auto train.py
Or, with two lines before the optimizer is made:
    poseidon.init()
    model = poseidon.DistributedDataParallel(model)
and then, here or on several machines:
    poseidon run --nproc 2 train.py
    poseidon run --hosts a,b train.py"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--workers", type=int, default=4, help="workers on this machine (default: 4)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the training images (default: 4)")
    parser.add_argument("--batch", type=int, default=64, help="total batch, divided among the workers (default: 64)")
    parser.add_argument(
        "--machines", type=int, default=4, help="emulated machines at the end (default: 4); 0 skips this part"
    )


def run(args: argparse.Namespace) -> int:
    """Train twice and compare results; then compare speeds where machines can be emulated."""
    _check(args)
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
        f"\nSame data, same total batch, same result: the {args.workers} workers exchanged gradients and stayed "
        "identical.\n(They share this machine's cores, so they are not faster here.)"
    )
    if args.machines:
        print(f"\n== DDP beside Poseidon on {args.machines} emulated machines at 1 Gbit/s ==", flush=True)
        try:
            print(compare_systems(args.machines))
        except ConfigError as error:
            print(f"left out: {error}")
    print(_NEXT)
    return 0


def compare_systems(machines: int, steps: int = 10) -> str:
    """Return what a step takes without communication, with PyTorch's DDP and with Poseidon.

    Raises :class:`ConfigError` where this process may not emulate machines.
    """
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "poseidon.cli.emulated", "--steps", str(steps), "--result", str(result)]
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **own_environment(), "OMP_NUM_THREADS": "1"}
        with ended_by_signals(), Lab(machines=machines, rate=RATE) as lab:
            options = JobOptions(timeout_s=EMULATION_LIMIT_S)
            job = Job(lab, command, options, environment, lambda place, line: lines.append(f"{place.label} | {line}"))
            outcome = job.run()
        if outcome.status != 0:
            raise PoseidonError("\n".join([f"the emulated machines failed: {outcome.reason}", *lines[-20:]]))
        figures = json.loads(result.read_text())
    return format_comparison(figures)


def format_comparison(figures: dict[str, dict[str, float]]) -> str:
    """Return the table of one comparison, and what it shows. Pure."""
    linear, ddp, ours = (figures[name] for name in ("linear", "ddp", "poseidon"))
    names = ("no communication (linear bound)", "PyTorch DDP", "Poseidon")
    rows = [
        (
            name,
            f"{found['step_ms']:.0f} ms",
            f"{found['step_ms'] / linear['step_ms']:.1f}x",
            f"{found['sent_mb']:.1f} MB",
            f"{found['loss']:.4f}" if found is not linear else "-",
        )
        for name, found in zip(names, (linear, ddp, ours), strict=True)
    ]
    table = format_table(("", "time per step", "of the bound", "sent per machine", "last loss"), rows)
    faster, fewer = ddp["step_ms"] / ours["step_ms"], ddp["sent_mb"] / ours["sent_mb"]
    return (
        f"{table}\n\nA fully connected net, {figures['net']['parameters'] / 1e6:.1f}M parameters. "
        f"Poseidon sends {fewer:.0f}x fewer bytes, and a step is {faster:.1f}x as fast:\n"
        "large layers travel as the two factors of their gradient, and every worker multiplies them."
    )


def _check(args: argparse.Namespace) -> None:
    if args.workers < 2:
        raise ConfigError(f"--workers is {args.workers}; it takes at least 2 to compare with 1")
    if args.epochs < 1:
        raise ConfigError(f"--epochs is {args.epochs}; it takes at least 1")
    if args.batch < args.workers or args.batch % args.workers:
        raise ConfigError(f"--batch is {args.batch}, which {args.workers} workers cannot share evenly")
    if args.machines not in (0, *range(2, 9)):
        raise ConfigError(f"--machines is {args.machines}; it must be 2 to 8, or 0 to skip the emulated machines")


def _train(args: argparse.Namespace, workers: int, result: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "poseidon.cli.digits", "--epochs", str(args.epochs), "--result", str(result)]
    command += ["--batch", str(args.batch // workers)]
    print(f"\n== training with {workers} worker{'s' * (workers > 1)} ==", flush=True)
    # Threads that spin while they wait would make one worker crawl on a machine that is busy with something else.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    status = run_workers(command, workers, environment, hears_interrupt=False)
    if status != 0:
        error = PoseidonError(
            f"training with {workers} worker(s) ended with status {status}; its output above says why"
        )
        if status > 128:  # a signal ended it, and maybe was meant for all
            error.exit_status = status
        raise error
    data: dict[str, float] = json.loads(result.read_text())
    return data
