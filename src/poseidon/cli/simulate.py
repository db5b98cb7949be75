"""``poseidon simulate``: speedups of several systems over machines, link speeds and batches, before buying anything."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.cli.plan import (
    STDOUT,
    add_model_arguments,
    make_cluster,
    make_setting,
    make_source,
    save_profile,
    with_device,
)
from poseidon.errors import ConfigError
from poseidon.planning.cluster import format_rate, parse_rate
from poseidon.planning.table import format_bytes
from poseidon.profiling.source import find_profile
from poseidon.sim.outcome import Outcome
from poseidon.sim.picture import draw_speedups, draw_timelines
from poseidon.sim.setting import Setting
from poseidon.sim.steps import simulate
from poseidon.sim.sweep import Axes, Point, format_points, sweep
from poseidon.sim.systems import SYSTEMS, System, find_system
from poseidon.sim.trace import write_trace
from poseidon.tables.clocks import Consistency


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_model_arguments(parser)
    what = parser.add_argument_group("what is varied (several: separated by commas)")
    what.add_argument("--machines", default="1,2,4,8,16,32", help="numbers of machines (default: 1,2,4,8,16,32)")
    what.add_argument("--rate", default="1gbit,10gbit", help="links between machines (default: 1gbit,10gbit)")
    what.add_argument("--batch", help="batches of each worker (default: the profile's, or 32)")
    what.add_argument("--systems", default="ring,ddp,ps,poseidon,distribute", help=f"of: {', '.join(SYSTEMS)}")
    uneven = parser.add_argument_group("machines that differ")
    uneven.add_argument(
        "--straggle", type=float, default=0.0, help="spread of random delays, 0.2 is lively (default: 0)"
    )
    uneven.add_argument("--slow", metavar="FACTOR", type=float, help="one machine takes this many times as long")
    uneven.add_argument("--consistency", default="bsp", help="bsp, ssp or asp, for systems with a parameter server")
    uneven.add_argument("--staleness", type=int, default=0, help="with ssp: clocks between fastest and slowest")
    uneven.add_argument("--switch", help="total capacity of the switch, as in 40gbit (default: unlimited)")
    uneven.add_argument("--seed", type=int, default=0, help="of the random delays")
    uneven.add_argument("--steps", type=int, help="simulated steps (default: 5; 30 with --straggle or --consistency)")
    out = parser.add_argument_group("what comes out")
    out.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE.json",
        help="print all figures as JSON, and nothing else; with a FILE: write them there",
    )
    out.add_argument("--picture", type=Path, help="write speedup curves to this PNG file")
    out.add_argument(
        "--timeline", type=Path, help="write the timeline of device and network card there to this PNG file"
    )
    out.add_argument("--trace", type=Path, help="write a timeline of the largest cluster (Chrome trace, for Perfetto)")


def run(args: argparse.Namespace) -> int:
    """Simulate and report."""
    machines = [_count(word, "--machines") for word in _words(args.machines)]
    rates = [parse_rate(word) for word in _words(args.rate)]
    systems = [find_system(name) for name in _words(args.systems)]
    batches = [_count(word, "--batch") for word in _words(args.batch)] if args.batch else []
    consistency = Consistency(args.consistency, args.staleness)
    base = _base(args, machines[0], rates[0], batches[0] if batches else None)
    axes = Axes(machines, rates, batches or [base.profile.batch], systems)
    points = _sweep(args, base, axes, consistency)
    profile = base.profile
    if args.json == STDOUT:
        print(json.dumps(_figures(args, base, points), indent=1))
        return 0
    size = format_bytes(profile.size_bytes)
    print(f"{profile.model}: {size} of gradients; one worker alone {profile.step_s * 1e3:.4g} ms")
    print(f"times: {profile.source}, {profile.device}, batch {profile.batch}")
    print(format_points(points))
    _write(args, base, axes, points)
    return 0


def _base(args: argparse.Namespace, machines: int, rate_bits: float, batch: int | None) -> Setting:
    source = make_source(args, batch)
    profile = find_profile(source)
    save_profile(args, profile)
    cluster = with_device(make_cluster(args, machines, rate_bits), source, profile)
    setting = make_setting(args, profile, cluster, "poseidon")
    is_long = args.straggle > 0 or args.consistency != "bsp"
    steps = args.steps if args.steps is not None else (30 if is_long else 5)
    switch = math.inf if args.switch is None else parse_rate(args.switch)
    return replace(setting, straggle=args.straggle, seed=args.seed, steps=steps, switch_bits_per_s=switch)


def _sweep(args: argparse.Namespace, base: Setting, axes: Axes, consistency: Consistency) -> list[Point]:
    if args.slow is None:
        return sweep(base, axes, consistency.bound)
    points = []
    for count in axes.machines:
        cluster = replace(base.cluster, machines=count)
        uneven = replace(base, cluster=cluster, slowdowns=(1.0,) * (count - 1) + (args.slow,))
        points += sweep(uneven, replace(axes, machines=[count]), consistency.bound)
    return points


def _figures(args: argparse.Namespace, base: Setting, points: list[Point]) -> dict[str, Any]:
    described = {"profile": base.profile.to_dict(), "cluster": base.cluster.to_dict(), "seed": args.seed}
    return {**described, "points": [point.to_dict() for point in points]}


def _write(args: argparse.Namespace, base: Setting, axes: Axes, points: list[Point]) -> None:
    if args.json:
        files.write_json(args.json, _figures(args, base, points), "figures")
        print(f"figures: {args.json}")
    largest = f"{max(axes.machines)} machines at {format_rate(axes.rates_bits[-1])}"
    timelines = _timelines(base, axes) if args.trace or args.timeline else {}
    if args.trace:
        write_trace(args.trace, {f"{name}, {largest}": outcome for name, outcome in timelines.items()})
        print(f"timeline: {args.trace} (open in ui.perfetto.dev)")
    try:
        if args.picture:
            draw_speedups(points, args.picture, f"{base.profile.model}, simulated")
            print(f"picture: {args.picture}")
        if args.timeline:
            draw_timelines(timelines, args.timeline, f"{base.profile.model}, {largest}, simulated")
            print(f"picture: {args.timeline}")
    except ConfigError as error:
        print(f"no picture: {error}", file=sys.stderr)


def _timelines(base: Setting, axes: Axes) -> dict[str, Outcome]:
    """Return every system's run on the largest cluster at its last link speed, with its spans."""
    count, rate = max(axes.machines), axes.rates_bits[-1]

    def setting_of(system: System) -> Setting:
        cluster = replace(base.cluster, machines=count)
        slow = () if not base.slowdowns else (1.0,) * (count - 1) + (base.slowdowns[-1],)
        return replace(
            base, cluster=cluster, system=system, slowdowns=slow, steps=3,
        ).with_rate(rate)  # fmt: skip

    return {system.name: simulate(setting_of(system), keep_spans=True) for system in axes.systems}


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{text!r} names nothing; give at least one, separated by commas")
    return words


def _count(word: str, option: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise ConfigError(f"{option} {word!r}: expected whole numbers from 1, separated by commas")
    return int(word)
