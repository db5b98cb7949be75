"""Predicted beside measured: every cell of the given result files, and the Poseidon paper's table.

Usage: python benchmarks/predict.py [--write] [RESULT.json ...]; without files all of benchmarks/results that hold
cells. Prints tables in Markdown. ``--write`` also makes benchmarks/results/predict.json and the pictures
docs/pictures/sim_measured.png and sim_paper.png, and puts the tables into benchmarks/predictions.md.

Predictions are made anew, with the simulator as it is now. What each layer computes is in the file, as it was measured
before anything was exchanged; in files without it is estimated from operation counts, or is as it was paced. It is
scaled to the cell's linear measurement, which is all else that a prediction takes from the measurements. (What a
benchmark itself stores as predicted rests on the simulator of its day.)
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from poseidon import zoo
from poseidon.planning.cluster import format_rate
from poseidon.planning.profile import Profile
from poseidon.profiling.measuring import estimate_profile
from poseidon.sim import paper
from poseidon.sim.cells import SIMULATED, Bench, predict_ms
from poseidon.sim.media import DEVICE_HANDLING_S, ISSUE_S, LEAST_HOST, MEDIA, STALL_S_PER_BYTE
from poseidon.sim.picture import STYLES, new_figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"
PAGE = ROOT / "benchmarks" / "predictions.md"
GPU_FLOPS = 60e12
"""Matrix rate of the whole H200 on gradients' shapes in TF32, for files without a profile; it matters little."""
CORE_FLOPS = 60e9
"""The same of one core."""
SLOWEST_OFF = 0.05
"""A spread of repetitions beyond this share is shown: such a cell cannot be predicted better than it repeats."""
OUTDATED = (
    "gpu_25gbe_x4",
    "gpu_25gbe_x8",
    "cpu_1gbe_dlrm",
    "predict_dlrm",
    "predict_dlrm_250mbit",
    "predict_dlrm_small",
)
"""Files in which the recommender's rows still travelled table by table, over gloo: what Poseidon took in them cannot be
compared with predictions of what it does now."""
TICKS_MS = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


@cache
def estimated(model: str, batch: int, flops: float, width: float | None, image_size: int | None) -> Profile:
    """Return a profile from operation counts."""
    with torch.device("meta"):
        network = zoo.build(model, dropout=0.0, width=width, image_size=image_size)
    inputs = tuple(part.to("meta") for part in network.batch(batch)[0])
    return estimate_profile(network.model, inputs, name=model, batch=batch, flops=flops)


def paced(profile: Profile, forward_ms: float, backward_ms: float) -> Profile:
    """Return the profile of a model whose layers were made to take equally long."""
    forward_s, backward_s = (ms / 1e3 / len(profile.units) for ms in (forward_ms, backward_ms))
    units = tuple(replace(one, forward_s=forward_s, backward_s=backward_s) for one in profile.units)
    return replace(profile, units=units)


def compare_file(path: Path) -> list[dict[str, Any]]:
    """Return one row for every measured system of a file that can be simulated."""
    data = json.loads(path.read_text())
    rows: list[dict[str, Any]] = []
    if data["settings"]["worker"].get("accumulate", 1) > 1:
        return rows  # the simulator knows no step of several batches
    for cell in data["cells"]:
        for system, measured in cell["systems"].items():
            if system == "linear" or system not in SIMULATED or not measured["repetitions"]:
                continue
            if path.stem in OUTDATED and cell["model"] == "dlrm" and system.startswith("poseidon"):
                continue
            predicted = _predict(data, cell, system)
            times = [repetition["step_ms"] for repetition in measured["repetitions"]]
            rows.append(
                {
                    "file": path.name,
                    "device": "GPU" if data["hardware"]["gpu"] else "CPU",
                    "is_paced": data["settings"]["worker"]["paced_ms"] is not None,
                    "model": cell["model"],
                    "machines": cell["machines"],
                    "rate_bits": cell["rate_bits"],
                    "system": system,
                    "linear_ms": cell["systems"]["linear"]["step_ms"],
                    "measured_ms": measured["step_ms"],
                    "spread_ms": [min(times), max(times)],
                    "predicted_ms": predicted,
                    "off": predicted / measured["step_ms"] - 1,
                }
            )
    return rows


def _predict(data: dict[str, Any], cell: dict[str, Any], system: str) -> float:
    is_gpu, machines = data["hardware"]["gpu"] is not None, cell["machines"]
    cores, worker = data["hardware"]["cores"], data["settings"]["worker"]
    profile, flops = cell.get("profile"), cell.get("flops")
    if profile:
        profile = Profile.from_dict(json.loads(profile))
    else:
        flops = GPU_FLOPS / machines if is_gpu else CORE_FLOPS * min(1.0, cores / machines)
        profile = estimated(cell["model"], cell["batch"], flops, worker["width"], worker["image_size"])
        profile = profile if worker["paced_ms"] is None else paced(profile, *worker["paced_ms"])
    bench = Bench(
        profile=profile,
        linear_s=cell["systems"]["linear"]["step_ms"] / 1e3,
        machines=machines,
        rate_bits=cell["rate_bits"],
        is_gpu=is_gpu,
        cores=cores,
        flops=flops,
        compacts=data["hardware"].get("compacts", False),
        precision=worker.get("precision", "float32"),
        uses_cores=not is_gpu and worker["paced_ms"] is None,
        tries=data.get("tries", False),
    )
    predicted = predict_ms(bench, system)
    assert predicted is not None
    return predicted


def compare_paper() -> list[dict[str, Any]]:
    """Return one row for each published speedup, and for networks that follow without fitting."""
    rows = []
    profile = estimated("vgg19-22k", paper.BATCH, paper.TITAN_X_FLOPS, None, None)
    for system, published in paper.PUBLISHED.items():
        for machines, speedup in zip(paper.NODES, published, strict=True):
            rows.append(_paper_row("vgg19-22k", system, machines, paper.LINK_BITS, speedup, profile))
    for name, machines, link, speedup in (*paper.PUBLISHED_ELSEWHERE, ("resnet152", 32, paper.LINK_BITS, None)):
        profile = estimated(name, paper.BATCH, paper.TITAN_X_FLOPS, None, None)
        rows.append(_paper_row(name, "poseidon-2017", machines, link, speedup, profile))
    return rows


def _paper_row(
    name: str, system: str, machines: int, link: float, published: float | None, profile: Profile
) -> dict[str, Any]:
    predicted = paper.predict(profile, system, machines, link).speedup
    off = None if published is None else predicted / published - 1
    return {"model": name, "system": system, "machines": machines, "link_bits": link, "published": published,
            "predicted": predicted, "off": off}  # fmt: skip


def format_cells(rows: list[dict[str, Any]]) -> str:
    """Return the comparison with the benchmark as Markdown."""
    lines = [
        "| cell | system | linear, ms | measured, ms (min .. max) | predicted, ms | off |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["spread_ms"]
        spread = f" ({low:.0f} .. {high:.0f})" if high > (1 + SLOWEST_OFF) * low else ""
        device = row["device"] + (", paced" if row["is_paced"] else "")
        cell = f"{row['model']}, {row['machines']} x {format_rate(row['rate_bits'])}, {device}"
        lines.append(
            f"| {cell} | {row['system']} | {row['linear_ms']:.0f} | {row['measured_ms']:.0f}{spread} | "
            f"{row['predicted_ms']:.0f} | {row['off']:+.1%} |"
        )
    inside = sum(abs(row["off"]) <= 0.10 for row in rows)
    worst = max((abs(row["off"]) for row in rows), default=0.0)
    lines += ["", f"{inside} of {len(rows)} within 10 %; the worst is off by {worst:.1%}."]
    return "\n".join(lines)


def format_paper(rows: list[dict[str, Any]]) -> str:
    """Return the comparison with the paper as Markdown."""
    lines = ["| network, link | system | machines | published | predicted | off |", "|---|---|---|---|---|---|"]
    for row in rows:
        published = "-" if row["published"] is None else f"{row['published']:g}"
        off = "" if row["off"] is None else f"{row['off']:+.1%}"
        lines.append(
            f"| {row['model']}, {format_rate(row['link_bits'])} | {row['system']} | {row['machines']} | {published} | "
            f"{row['predicted']:.2f} | {off} |"
        )
    return "\n".join(lines)


def put_into(path: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of this name in a page."""
    begin, end = f"<!-- {name}: made by benchmarks/predict.py -->", f"<!-- end of {name} -->"
    before, _, rest = path.read_text().partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def draw_cells(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw predicted over measured times; the band is 10 % to either side."""
    figure, (axis, *_) = new_figure(1, width=6.0, height=5.4)
    ends = [0.8 * min(row["measured_ms"] for row in rows), 1.25 * max(row["measured_ms"] for row in rows)]
    axis.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="grey", alpha=0.2)
    axis.plot(ends, ends, color="grey", linewidth=1)
    for system in dict.fromkeys(row["system"] for row in rows):
        for device, filled in (("GPU", True), ("CPU", False)):
            chosen = [row for row in rows if row["system"] == system and row["device"] == device]
            if not chosen:
                continue
            colour = STYLES[SIMULATED[system]]["color"]
            axis.plot(
                [row["measured_ms"] for row in chosen],
                [row["predicted_ms"] for row in chosen],
                linestyle="none",
                marker="o" if device == "GPU" else "s",
                color=colour,
                markerfacecolor=colour if filled else "none",
                label=f"{system}, {device}",
            )
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ticks = [tick for tick in TICKS_MS if ends[0] < tick < ends[1]]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set(xlabel="measured, ms per step", ylabel="predicted, ms per step")
    axis.set_title("Predicted and measured; the band is 10 %", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def draw_paper(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the table of VGG19-22K: published as marks, predicted as lines."""
    figure, (axis, *_) = new_figure(1, width=6.0, height=5.0)
    axis.plot(paper.NODES, paper.NODES, label="linear", **STYLES["linear"])
    for system in paper.PUBLISHED:
        chosen = [row for row in rows if row["system"] == system and row["model"] == "vgg19-22k"
                  and row["link_bits"] == paper.LINK_BITS]  # fmt: skip
        colour = STYLES[system]["color"]
        axis.plot([row["machines"] for row in chosen], [row["predicted"] for row in chosen], color=colour,
                  label=f"{system}, predicted")  # fmt: skip
        axis.plot([row["machines"] for row in chosen], [row["published"] for row in chosen], color=colour,
                  linestyle="none", marker=STYLES[system]["marker"], label=f"{system}, published")  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(paper.NODES, [str(count) for count in paper.NODES])
    axis.set_yticks((1, *paper.NODES), [str(count) for count in (1, *paper.NODES)])
    axis.set(xlabel="machines", ylabel="speedup")
    axis.set_title("VGG19-22K on Titan X over 40 GbE: published and predicted", fontsize=11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(arguments: list[str]) -> None:
    """Compare, print, and write where asked."""
    writes = "--write" in arguments
    named = [Path(word) for word in arguments if word != "--write"]
    found = [
        path for path in sorted(RESULTS.glob("*.json")) if {"settings", "cells"} <= set(json.loads(path.read_text()))
    ]
    cells = [row for path in named or found for row in compare_file(path)]
    published = compare_paper()
    print(format_cells(cells), format_paper(published), sep="\n\n")
    if writes:
        constants = {
            "cells": {
                "least_host": LEAST_HOST,
                "message_s": MEDIA["messages"].message_s,
                "device_handling_s": DEVICE_HANDLING_S,
                "issue_s": ISSUE_S,
                "stall_s_per_byte": STALL_S_PER_BYTE,
                "stall_power": MEDIA["messages"].stall_power,
            },
            "paper": {"host_bits": paper.HOST_BITS, "incast_exponent": paper.INCAST_EXPONENT},
        }
        data = {"cells": cells, "paper": published, "fitted": constants}
        (RESULTS / "predict.json").write_text(json.dumps(data, indent=1) + "\n")
        draw_cells(cells, PICTURES / "sim_measured.png")
        draw_paper(published, PICTURES / "sim_paper.png")
        put_into(PAGE, "cells", format_cells(cells))
        put_into(PAGE, "paper", format_paper(published))


if __name__ == "__main__":
    main(sys.argv[1:])
