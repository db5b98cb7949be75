"""``poseidon bench``: compare Poseidon with its peers in labs; print tables, write JSON and a picture."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from poseidon import files, zoo
from poseidon.cli import to_loss
from poseidon.cli.bench_words import check_device, parse_count, parse_paced, place_picture, report, say, words_of
from poseidon.cli.lab import ended_by_signals
from poseidon.errors import ConfigError
from poseidon.lab.bench import BenchSettings, run_bench, write_results
from poseidon.lab.bench_worker import WorkerSettings, build
from poseidon.lab.picture import draw
from poseidon.lab.results import LINEAR, Cell, cells_from_json, format_table
from poseidon.lab.spec import parse_rate
from poseidon.lab.system_names import SHORT
from poseidon.lab.systems import OPTIMIZERS, POWERSGD_START, PRECISIONS, SYSTEMS, check_system

DEFAULT_OUTPUT = Path("bench.json")
DEFAULT_SYSTEMS = "linear,ddp,poseidon"
DEFAULT_STEPS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--models", default="alexnet", help=f"of: {', '.join(zoo.names())}; or torchvision/NAME, transformers/NAME"
    )
    what.add_argument("--machines", default="4", help="cluster sizes, such as 2,4,8")
    what.add_argument("--rate", help="link speeds, such as 1gbit,10gbit (default 1gbit; with --to-loss 100mbit)")
    what.add_argument(
        "--against",
        help=f"systems: {', '.join(SYSTEMS)}; in short {', '.join(SHORT)}; Poseidon's with options, as in "
        "poseidon-distribute:update=server or local:sync_every=50 (default linear,ddp,poseidon)",
    )
    what.add_argument("--batch", help="samples per worker; per model too: 32,gpt2=4 (default 32)")
    what.add_argument("--precision", choices=tuple(PRECISIONS), default="float32", help="bf16: under torch.autocast")
    what.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="sgd", help="default sgd, with momentum")
    what.add_argument(
        "--accumulate", type=int, default=1, metavar="N", help="batches in a step, all but the last under no_sync()"
    )
    what.add_argument("--tiny", action="store_true", help="the zoo's tiny networks, for a quick look")
    what.add_argument("--width", type=float, help="scale the networks' layers; 1 is as published")
    what.add_argument("--image-size", type=int, help="height and width of images; default: as published")
    what.add_argument(
        "--paced",
        metavar="FORWARD_MS:BACKWARD_MS",
        help="make passes take this time without using the CPU (use a small batch)",
    )
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--steps", type=int, help="timed steps per repetition (default 10)")
    how.add_argument("--warmup", type=int, default=3, help="steps before them, not timed (default 3)")
    how.add_argument("--repetitions", type=int, default=3, help="rounds over all systems (default 3)")
    how.add_argument("--threads", type=int, default=1, help="CPU threads per worker (default 1)")
    how.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: all workers share one GPU")
    how.add_argument("--timeout", type=float, default=600.0, help="most seconds for one cell (default 600)")
    to_loss.add_arguments(parser)
    out = parser.add_argument_group("what comes out")
    out.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="JSON file (default bench.json)")
    out.add_argument("--picture", type=Path, help="PNG file (default: the JSON file's name with .png)")
    out.add_argument("--plot", type=Path, nargs="+", metavar="FILE", help="measure nothing; show and draw these files")


def run(args: argparse.Namespace) -> int:
    """Measure and report; the status is 1 if a system failed or its result differs from DDP's."""
    if not args.timeout > 0:
        raise ConfigError(f"--timeout is {args.timeout:g} s, expected more than 0")
    if args.to_loss or (args.plot and to_loss.holds_losses(args.plot[0])):
        return to_loss.run(args)
    if args.plot:
        cells = [cell for path in args.plot for cell in _read_cells(path)]
        _report(cells, args.picture or args.plot[0].with_suffix(".png"))
        return 0
    settings = make_settings(args)
    check_device(args.device)
    picture = place_picture(args.output, args.picture)
    with ended_by_signals():
        cells = run_bench(settings, say, lambda cells: write_results(args.output, settings, cells))
    print(f"results: {args.output}")
    _report(cells, picture)
    return int(any(cell.verdict(name) in ("failed", "WRONG") for cell in cells for name in cell.systems))


def make_settings(args: argparse.Namespace) -> BenchSettings:
    """Return checked settings for the options."""
    to_loss.refuse_options(args)
    steps = DEFAULT_STEPS if args.steps is None else args.steps
    models = words_of(args.models)
    systems = words_of(args.against or DEFAULT_SYSTEMS)
    for system in systems:
        check_system(system, args.device)
    batch, batches = parse_batches(args.batch or "32")
    given = ("warmup", "repetitions", "threads", "accumulate")
    counts = {"steps": steps, **{name: getattr(args, name) for name in given}}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name} must be at least 1, not {count}")
    if "ddp-powersgd" in systems and args.warmup <= POWERSGD_START:
        raise ConfigError(
            f"--warmup {args.warmup} is too short for ddp-powersgd, which sends whole gradients in its first "
            f"{POWERSGD_START} steps; use at least {POWERSGD_START + 1}"
        )
    worker = WorkerSettings(
        model=models[0],
        systems=tuple(dict.fromkeys([LINEAR, *systems])),
        batch=batch,
        steps=steps,
        warmup=args.warmup,
        repetitions=args.repetitions,
        threads=args.threads,
        device=args.device,
        tiny=args.tiny,
        width=args.width,
        image_size=args.image_size,
        precision=args.precision,
        optimizer=args.optimizer,
        accumulate=args.accumulate,
        paced_ms=None if args.paced is None else parse_paced(args.paced),
        timeout_s=min(120.0, args.timeout),
    )
    with torch.device("meta"):
        for model in models:
            build(replace(worker, model=model))
    return BenchSettings(
        models=tuple(models),
        machines=tuple(parse_count(word) for word in words_of(args.machines)),
        rates_bits=tuple(parse_rate(word) for word in words_of(args.rate or "1gbit")),
        worker=worker,
        batches=batches,
        cell_timeout_s=args.timeout,
    )


def parse_batches(words: str) -> tuple[int, dict[str, int]]:
    """Return the common batch and those of single models for ``32,gpt2=4``."""
    common = 32
    single: dict[str, int] = {}
    for word in words_of(words):
        model, equals, size = word.rpartition("=")
        if not size.isdigit() or int(size) < 1 or (equals and not _is_model(model)):
            raise ConfigError(f"--batch {word!r} is not understood; write 32, or 32,gpt2=4 with a network's name")
        if equals:
            single[model] = int(size)
        else:
            common = int(size)
    return common, single


def _is_model(name: str) -> bool:
    return name in zoo.names() or zoo.is_borrowed(name)


def _read_cells(path: Path) -> list[Cell]:
    try:
        return cells_from_json(files.read_json(path, "benchmark results")["cells"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of benchmark results ({type(error).__name__}: {error})") from None


def _report(cells: list[Cell], picture: Path) -> None:
    report([format_table(cell) for cell in cells], lambda path: draw(cells, path), picture)
