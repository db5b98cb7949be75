"""How many times linear a step takes by link speed, exact and otherwise: the picture of docs/slow-links.md.

Usage: python benchmarks/slow_links.py [--output docs/pictures/slow_links.png]

Everything is predicted, by what `poseidon plan --allow lossy` asks too: seconds, on any machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from poseidon.cli.parser import CommandParser
from poseidon.cli.plan import add_arguments, make_cluster, make_setting, make_source, with_device
from poseidon.planning.cluster import format_rate
from poseidon.profiling.source import find_profile
from poseidon.sim.proposals import GOOD_ENOUGH, propose

RATES = (1e7, 3e7, 1e8, 3e8, 1e9, 2.5e9, 1e10, 2.5e10)
MODELS = (("gpt2", 8, 4, 50_000.0), ("resnet50", 8, 32, 10_000.0), ("dlrm", 4, 128, 1_000.0))
"""Network, machines, batch of each, and its device's GFLOP/s."""
COLOURS = {
    "exact": "tab:red",
    "bf16": "tab:green",
    "int8": "tab:olive",
    "lowrank": "tab:blue",
    "topk": "tab:orange",
    "local": "tab:purple",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/slow_links.png"))
    options = parser.parse_args()
    figure = Figure(figsize=(4.6 * len(MODELS), 4.2), layout="constrained")
    for axis, (model, machines, batch, gflops) in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        lines = predict(model, machines, batch, gflops)
        for way, values in lines.items():
            axis.plot([rate / 1e6 for rate in RATES], values, marker="o", color=COLOURS[way], label=way)
        axis.axhline(GOOD_ENOUGH, color="grey", linestyle=":", linewidth=1)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(f"{model}, {machines} machines, {gflops / 1e3:g} TFLOP/s each")
        axis.set_xlabel("link, Mbit/s")
        axis.set_ylabel("step time / linear (dotted: 1.1)")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize="small")
    figure.savefig(options.output, dpi=110)
    print(options.output)


def predict(model: str, machines: int, batch: int, gflops: float) -> dict[str, list[float]]:
    parser = CommandParser()
    add_arguments(parser)
    args = parser.parse_args([model, "--machines", str(machines), "--device-gflops", str(gflops)])
    source = make_source(args, batch)
    profile = find_profile(source)
    lines: dict[str, list[float]] = {}
    for rate in RATES:
        cluster = with_device(make_cluster(args, machines, rate), source, profile)
        proposals = propose(make_setting(args, profile, cluster, "distribute"))
        print(f"{model} at {format_rate(rate)}: {proposals.verdict}", flush=True)
        for one in proposals.every:
            lines.setdefault(one.name, []).append(one.times_linear)
    return lines


if __name__ == "__main__":
    main()
