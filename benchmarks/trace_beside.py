"""The trace of a real run beside the simulator's, as a picture: what was predicted, and what happened.

Usage: sudo python benchmarks/trace_beside.py [--picture docs/pictures/trace_beside.png] [--keep FOLDER]

AlexNet of a quarter of its width (64 pixels, batch 8) trains on four emulated machines at 20 Mbit/s with ``poseidon
run --trace``; the simulator gets the same times and rates. Layers are paced to 400 + 800 ms, as in paced_1gbe.sh, and
the net is narrow, so that few cores do not matter. Needs root, sshd, and the extra ``lab``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "cluster")]

MODEL, WIDTH, IMAGE, BATCH, PACED_MS = "alexnet", 0.25, 64, 8, (400.0, 800.0)
MACHINES, RATE, RATE_TEXT = 4, 2e7, "20mbit"
STEPS, TRACED = 12, (8, 10)
COLOURS = {"in forward": "tab:blue", "in backward": "tab:purple", "between steps": "tab:olive"}


def train() -> None:
    """Be one worker of the job."""
    import torch

    import poseidon
    from poseidon import zoo
    from poseidon.lab.pace import paced

    poseidon.init()
    torch.manual_seed(0)
    network = zoo.build(MODEL, dropout=0.0, width=WIDTH, image_size=IMAGE)
    model = poseidon.DistributedDataParallel(paced(network.model, *PACED_MS), trials=False)
    optimizer = torch.optim.SGD(network.model.parameters(), 0.001)
    inputs, targets = network.batch(BATCH)
    for _ in range(STEPS):
        network.loss(model(*inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.close()


def record(folder: Path) -> dict[str, Any]:
    """Run the job in a lab and return its trace."""
    from sshd import ensure_sshd, serving

    from poseidon.lab import Lab

    problem = ensure_sshd()
    if problem:
        raise SystemExit(problem)
    with Lab(machines=MACHINES, rate=RATE_TEXT) as lab, serving(lab, folder) as ssh:
        hosts = ",".join(f"machine{number}" for number in range(MACHINES))
        steps = "{}:{}".format(*TRACED)
        command = [sys.executable, "-m", "poseidon", "run", "--hosts", hosts, "--trace", steps]
        command += ["--log-dir", str(folder / "run"), str(Path(__file__).resolve())]
        env = {**os.environ, **ssh.env, "OMP_NUM_THREADS": "1"}
        with (folder / "output").open("wb") as output:
            status = lab.spawn(0, command, env=env, stdout=output, stderr=subprocess.STDOUT).wait(300)
    if status:
        raise SystemExit((folder / "output").read_text())
    found: dict[str, Any] = json.loads((folder / "run" / "trace.json").read_text())
    return found


def predict() -> Any:
    """Simulate the same job."""
    from predict import CORE_FLOPS, estimated, paced

    from poseidon.sim.cells import Bench, make_bench_setting
    from poseidon.sim.steps import simulate

    cores = os.cpu_count() or 1
    flops = CORE_FLOPS * min(1.0, cores / MACHINES)
    profile = paced(estimated(MODEL, BATCH, flops, WIDTH, IMAGE), *PACED_MS)
    bench = Bench(profile, profile.step_s, MACHINES, RATE, is_gpu=False, cores=cores, flops=flops)
    return simulate(make_bench_setting(bench, "poseidon"), keep_spans=True)


def draw(trace: dict[str, Any], outcome: Any, path: Path) -> None:
    """Draw one predicted and one real step of every worker on one scale."""
    from matplotlib.patches import Patch

    from poseidon.sim.picture import new_figure

    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    workers = sorted({event["pid"] for event in events})
    starts = {one: sorted(e["ts"] for e in events if e["pid"] == one and e["name"] == "in forward") for one in workers}
    zero, step_ms = min(each[0] for each in starts.values()), (starts[1][1] - starts[1][0]) / 1e3
    figure, axes = new_figure(1 + len(workers), width=10.0, height=1.35, columns=1)
    first = outcome.step_s * 1  # its second step: the first has no exchange behind it
    rows = [(f"predicted: {outcome.step_s * 1e3:.0f} ms a step", [])]
    for span in outcome.spans:
        begin, end = 1e3 * (span.start_s - first), 1e3 * (span.end_s - first)
        kind = {"forward": "in forward", "backward": "in backward"}.get(span.route, "between steps")
        rows[0][1].append(("item" if span.place == "out" else kind, begin, end))
    for worker in workers:
        bars = []
        for event in events:
            if event["pid"] == worker:
                begin = (event["ts"] - zero) / 1e3
                kind = event["name"] if event["cat"] == "phase" else "wait" if event["cat"] == "wait" else "item"
                bars.append((kind, begin, begin + event["dur"] / 1e3))
        name = f"machine{worker - 1}" + (f": {step_ms:.0f} ms a step" if worker == 1 else "")
        rows.append((name, bars))
    until = max(step_ms, outcome.step_s * 1e3) * 1.02
    for axis, (name, bars) in zip(axes, rows, strict=True):
        lanes: list[float] = []
        for kind, begin, end in sorted(bars, key=lambda bar: (bar[0] == "wait", bar[1])):
            if end <= 0 or begin >= until:
                continue
            begin, end = max(0.0, begin), min(until, end)
            if kind == "item":
                lane = next((at for at, free in enumerate(lanes) if free <= begin + 1e-6), len(lanes))
                lanes[lane:] = [end] if lane == len(lanes) else [end, *lanes[lane + 1 :]]
                axis.broken_barh([(begin, end - begin)], (-0.16 * (lane % 6) - 0.2, 0.12), facecolor="tab:red")
            elif kind == "wait":
                axis.broken_barh([(begin, end - begin)], (0.1, 0.7), facecolor="0.9", hatch="////", edgecolor="0.6")
            else:
                colour = COLOURS.get(kind, COLOURS["in backward"])
                axis.broken_barh([(begin, end - begin)], (0.1, 0.7), facecolor=colour)
        axis.set_xlim(0, until)
        axis.set_ylim(-1.15, 0.9)
        axis.set_yticks((-0.5, 0.45), ("wire", "computing"))
        axis.tick_params(axis="y", length=0)
        axis.set_title(name, fontsize=9, loc="left", pad=2)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        if axis is not axes[-1]:
            axis.set_xticklabels([])
    axes[-1].set_xlabel("milliseconds from the start of a step")
    handles = [Patch(color=colour, label=name.removeprefix("in ")) for name, colour in COLOURS.items()]
    handles += [
        Patch(facecolor="0.9", hatch="////", edgecolor="0.6", label="waiting"),
        Patch(color="tab:red", label="wire"),
    ]
    figure.legend(handles=handles, ncols=5, loc="outside lower center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "pictures" / "trace_beside.png")
    parser.add_argument("--keep", type=Path, help="leave run and trace in this folder; if it has them, draw only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = args.keep or Path(text)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "run" / "trace.json"
        trace = json.loads(kept.read_text()) if kept.exists() else record(folder)
        outcome = predict()
        draw(trace, outcome, args.picture)
    for entry in outcome.plan.entries:
        print(f"{entry.unit:24} {entry.route:10} {1e3 * entry.cost.wire_s:8.1f} ms on the wire, predicted")
    print(f"predicted {outcome.step_s * 1e3:.0f} ms a step; the picture is {args.picture}")


if __name__ == "__main__":
    train() if "RANK" in os.environ else main()
