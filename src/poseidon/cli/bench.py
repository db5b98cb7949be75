"""``poseidon bench``: compare Poseidon with its peers in labs; print tables, write JSON and a picture."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from poseidon import files, zoo
from poseidon.cli.lab import ended_by_signals
from poseidon.errors import ConfigError
from poseidon.lab.bench import BenchSettings, run_bench, write_results
from poseidon.lab.bench_worker import WorkerSettings, build
from poseidon.lab.picture import draw
from poseidon.lab.results import LINEAR, Cell, cells_from_json, format_table
from poseidon.lab.spec import MAX_MACHINES, parse_rate
from poseidon.lab.systems import OPTIMIZERS, POWERSGD_START, PRECISIONS, SYSTEMS, check_system

DEFAULT_OUTPUT = Path("bench.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--models", default="alexnet", help=f"of: {', '.join(zoo.names())}; or torchvision/NAME, transformers/NAME"
    )
    what.add_argument("--machines", default="4", help="cluster sizes, such as 2,4,8")
    what.add_argument("--rate", default="1gbit", help="link speeds, such as 1gbit,10gbit")
    what.add_argument(
        "--against",
        default="linear,ddp,poseidon",
        help=f"systems: {', '.join(SYSTEMS)}; Poseidon's with options, as in poseidon-distribute:update=server",
    )
    what.add_argument("--batch", default="32", help="samples per worker; per model too: 32,gpt2=4")
    what.add_argument("--precision", choices=tuple(PRECISIONS), default="float32", help="bf16: under torch.autocast")
    what.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="default sgd, with momentum")
    what.add_argument("--tiny", action="store_true", help="the zoo's tiny networks, for a quick look")
    what.add_argument("--width", type=float, help="scale the networks' layers; 1 is as published")
    what.add_argument("--image-size", type=int, help="height and width of images; default: as published")
    what.add_argument(
        "--paced",
        metavar="FORWARD_MS:BACKWARD_MS",
        help="make passes take this time without using the CPU (use a small batch)",
    )
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--steps", type=int, default=10, help="timed steps per repetition (default 10)")
    how.add_argument("--warmup", type=int, default=3, help="steps before them, not timed (default 3)")
    how.add_argument("--repetitions", type=int, default=3, help="rounds over all systems (default 3)")
    how.add_argument("--threads", type=int, default=1, help="CPU threads per worker (default 1)")
    how.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all workers share one GPU")
    how.add_argument("--timeout", type=float, default=600.0, help="most seconds for one cell (default 600)")
    out = parser.add_argument_group("what comes out")
    out.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="JSON file (default bench.json)")
    out.add_argument("--picture", type=Path, help="PNG file (default: the JSON file's name with .png)")
    out.add_argument("--plot", type=Path, nargs="+", metavar="FILE", help="measure nothing; show and draw these files")


def run(args: argparse.Namespace) -> int:
    """Measure and report; the status is 1 if a system failed or its result differs from DDP's."""
    if args.plot:
        cells = [cell for path in args.plot for cell in _read_cells(path)]
        _report(cells, args.picture or args.plot[0].with_suffix(".png"))
        return 0
    settings = make_settings(args)
    with ended_by_signals():
        cells = run_bench(settings, _say, lambda cells: write_results(args.output, settings, cells))
    print(f"results: {args.output}")
    _report(cells, args.picture or args.output.with_suffix(".png"))
    return int(any(cell.verdict(name) in ("failed", "WRONG") for cell in cells for name in cell.systems))


def make_settings(args: argparse.Namespace) -> BenchSettings:
    """Return checked settings for the options."""
    models = _words(args.models)
    systems = _words(args.against)
    for system in systems:
        check_system(system, args.device)
    batch, batches = parse_batches(args.batch)
    for name in ("steps", "warmup", "repetitions", "threads"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if "ddp-powersgd" in systems and args.warmup <= POWERSGD_START:
        raise ConfigError(
            f"--warmup {args.warmup} is too short for ddp-powersgd, which sends whole gradients in its first "
            f"{POWERSGD_START} steps; use at least {POWERSGD_START + 1}"
        )
    worker = WorkerSettings(
        model=models[0],
        systems=tuple(dict.fromkeys([LINEAR, *systems])),
        batch=batch,
        steps=args.steps,
        warmup=args.warmup,
        repetitions=args.repetitions,
        threads=args.threads,
        device=args.device,
        tiny=args.tiny,
        width=args.width,
        image_size=args.image_size,
        precision=args.precision,
        optimizer=args.optimizer,
        paced_ms=None if args.paced is None else parse_paced(args.paced),
        timeout_s=min(120.0, args.timeout),
    )
    with torch.device("meta"):
        for model in models:
            build(replace(worker, model=model))
    return BenchSettings(
        models=tuple(models),
        machines=tuple(_parse_count(word) for word in _words(args.machines)),
        rates_bits=tuple(parse_rate(word) for word in _words(args.rate)),
        worker=worker,
        batches=batches,
        cell_timeout_s=args.timeout,
    )


def parse_batches(words: str) -> tuple[int, dict[str, int]]:
    """Return the common batch and those of single models for ``32,gpt2=4``."""
    common = 32
    single: dict[str, int] = {}
    for word in _words(words):
        model, equals, size = word.rpartition("=")
        if not size.isdigit() or int(size) < 1 or (equals and not _is_model(model)):
            raise ConfigError(f"--batch {word!r} is not understood; write 32, or 32,gpt2=4 with a network's name")
        if equals:
            single[model] = int(size)
        else:
            common = int(size)
    return common, single


def parse_paced(word: str) -> tuple[float, float]:
    """Return forward and backward milliseconds for ``40:80``."""
    try:
        forward, backward = (float(part) for part in word.split(":"))
    except ValueError:
        raise ConfigError(f"--paced {word!r} is not understood; write FORWARD_MS:BACKWARD_MS, such as 40:80") from None
    if forward < 0 or backward < 0:
        raise ConfigError(f"--paced {word!r}: times must not be negative")
    return forward, backward


def _is_model(name: str) -> bool:
    return name in zoo.names() or zoo.is_borrowed(name)


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{text!r} names nothing; give at least one, separated by commas")
    return words


def _parse_count(word: str) -> int:
    if not word.isdigit() or not 2 <= int(word) <= MAX_MACHINES:
        raise ConfigError(f"--machines {word!r}: a benchmark needs 2 to {MAX_MACHINES} machines")
    return int(word)


def _read_cells(path: Path) -> list[Cell]:
    try:
        return cells_from_json(files.read_json(path, "benchmark results")["cells"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of benchmark results ({type(error).__name__}: {error})") from None


def _report(cells: list[Cell], picture: Path) -> None:
    for cell in cells:
        print(f"\n{format_table(cell)}")
    try:
        draw(cells, picture)
        print(f"\npicture: {picture}")
    except ConfigError as error:
        print(f"\nno picture: {error}", file=sys.stderr)


def _say(line: str) -> None:
    print(line, flush=True)
