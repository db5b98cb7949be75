"""``poseidon bench --to-loss``: compare systems by the time they take to a validation loss."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from poseidon import files
from poseidon.cli.bench_words import check_device, parse_count, parse_paced, place_picture, report, say, words_of
from poseidon.cli.lab import ended_by_signals
from poseidon.errors import ConfigError
from poseidon.lab.loss_bench import LossSettings, check_losses, read_losses, resume, run_loss_bench, write_losses
from poseidon.lab.loss_picture import draw_losses
from poseidon.lab.loss_results import Comparison, format_comparison
from poseidon.lab.spec import parse_rate
from poseidon.lab.systems import check_system
from poseidon.zoo.lessons import lesson_names, make_lesson

TOLERANCE_PERCENT = 0.5
_OWN = ("seeds", "every", "more", "target", "tolerance", "stalls", "dilate")
_FOREIGN = {
    "models": "alexnet",
    "precision": "float32",
    "optimizer": "sgd",
    "accumulate": 1,
    "width": None,
    "image_size": None,
}
"""Options of the other comparison, and their defaults: lessons bring these along."""


@dataclass(frozen=True)
class LessonPlan:
    """How a lesson is compared unless options say otherwise."""

    steps: int
    every: int
    paced: str
    """Forward and backward in milliseconds ..."""
    dilation: float
    """... which two cores can compute for four workers if they get so many times as long."""
    systems: str


_SYSTEMS = "ddp,ddp-powersgd,poseidon,lowrank,local"
PLANS = {
    # Its ssp would train in real time at the speed of the link, for an hour.
    "text": LessonPlan(150, 10, "40:80", 4, _SYSTEMS),
    "digits": LessonPlan(160, 10, "20:40", 2, f"{_SYSTEMS},ssp"),
    "clicks": LessonPlan(300, 20, "40:80", 2, f"{_SYSTEMS},ssp"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this comparison."""
    options = parser.add_argument_group("time to a validation loss instead of time per step")
    options.add_argument(
        "--to-loss",
        nargs="?",
        const="text",
        choices=lesson_names(),
        help="train a lesson: text (a transformer on Python's reference), digits (LeNet) or clicks (a recommender)",
    )
    options.add_argument("--target", type=float, help="the loss to reach (default: ddp's final one, for each seed)")
    options.add_argument("--tolerance", type=float, metavar="PERCENT", help="above ddp's final loss (default 0.5)")
    options.add_argument("--seeds", type=int, help="number of seeds (default 3)")
    options.add_argument("--every", type=int, metavar="STEPS", help="between evaluations (default: by lesson)")
    options.add_argument(
        "--more", type=float, help="most steps of the systems that are not exact, as a multiple (default 2)"
    )
    options.add_argument(
        "--stalls", metavar="P:STEPS", help="workers stall with probability P, for so many steps' time"
    )
    options.add_argument(
        "--dilate",
        type=float,
        metavar="FACTOR",
        help="make links and paced compute so many times slower and divide times by it: more processor time for each "
        "emulated machine (default: by lesson)",
    )
    options.add_argument(
        "--real", action="store_true", help="train all on the clock, not only those whose workers drift apart"
    )


def refuse_options(args: argparse.Namespace) -> None:
    """Refuse options of this comparison without ``--to-loss``."""
    given = [name for name in _OWN if getattr(args, name) is not None] + ["real"] * args.real
    if given:
        raise ConfigError(f"--{given[0]} needs --to-loss, which compares by time to a loss")


def run(args: argparse.Namespace) -> int:
    """Measure what is missing and report; the status is 1 if a system failed."""
    if args.plot:
        _report([read_losses(path)[1] for path in args.plot], args.picture or args.plot[0].with_suffix(".png"))
        return 0
    settings = make_settings(args)
    check_device(args.device)
    picture = place_picture(args.output, args.picture)
    known = resume(args.output, settings)
    with ended_by_signals():
        found = run_loss_bench(settings, known, say, lambda found: write_losses(args.output, settings, found))
    write_losses(args.output, settings, found)
    print(f"results: {args.output}")
    _report([found], picture)
    return int(any(run.failure for run in found.runs) or any(tempo.failure for tempo in found.tempos.values()))


def make_settings(args: argparse.Namespace) -> LossSettings:
    """Return checked settings for the options."""
    for name, default in _FOREIGN.items():
        if getattr(args, name) != default:
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --to-loss: lessons bring it along")
    plan = PLANS[args.to_loss]
    systems = tuple(dict.fromkeys(words_of(args.against or plan.systems)))
    for system in systems:
        check_system(system, args.device)
    is_paced = args.device == "cpu" and args.paced != "none"
    settings = LossSettings(
        lesson=args.to_loss,
        systems=systems,
        seeds=tuple(range(3 if args.seeds is None else args.seeds)),
        machines=parse_count(args.machines),
        rate_bits=parse_rate(args.rate or "100mbit"),
        steps=plan.steps if args.steps is None else args.steps,
        more=2.0 if args.more is None else args.more,
        batch=make_lesson(args.to_loss, tiny=args.tiny).batch if args.batch is None else _parse_batch(args.batch),
        every=plan.every if args.every is None else args.every,
        tolerance=(TOLERANCE_PERCENT if args.tolerance is None else args.tolerance) / 100,
        target=args.target,
        paced_ms=parse_paced(args.paced or plan.paced) if is_paced else None,
        stalls=None if args.stalls is None else parse_stalls(args.stalls),
        dilation=(plan.dilation if is_paced else 1.0) if args.dilate is None else args.dilate,
        is_real=args.real,
        tiny=args.tiny,
        threads=args.threads,
        device=args.device,
        cell_timeout_s=args.timeout,
    )
    check_losses(settings)
    return settings


def parse_stalls(word: str) -> tuple[float, float]:
    """Return probability and length for ``0.2:3``."""
    try:
        probability, steps = (float(part) for part in word.split(":"))
    except ValueError:
        raise ConfigError(f"--stalls {word!r} is not understood; write PROBABILITY:STEPS, such as 0.2:3") from None
    if not 0 <= probability <= 1 or not 0 <= steps < math.inf:
        raise ConfigError(f"--stalls {word!r}: a probability is 0 to 1, and a stall takes 0 steps' time or more")
    return probability, steps


def holds_losses(path: Path) -> bool:
    """Return whether a file of results is of this comparison."""
    results = files.read_json(path, "results")
    return isinstance(results, dict) and "to_loss" in results


def _parse_batch(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise ConfigError(f"--batch {word!r}: with --to-loss it is one number, of samples per worker")
    return int(word)


def _report(comparisons: Sequence[Comparison], picture: Path) -> None:
    report([format_comparison(one) for one in comparisons], lambda path: draw_losses(comparisons, path), picture)
