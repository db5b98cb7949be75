"""The README's speedup picture from files of ``poseidon bench``.

Usage: python benchmarks/speedup.py [--output PICTURE.png] RESULT.json ...

One panel per model and link speed, one line per exact system, and the bound that the wire sets for full gradients. A
speedup is machines x linear time / time, both from the same cell. Where several files hold the same cell, a system's
point comes from the last file that measured it. A system that was not measured everywhere gets marks and no line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poseidon.lab.results import LINEAR, Cell, cells_from_json
from poseidon.planning.cluster import format_rate
from poseidon.sim.picture import new_figure

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "speedup.png"
TITLES = {"vgg19": "VGG19", "resnet152": "ResNet-152", "gpt2": "GPT-2-like", "dlrm": "DLRM-like"}
SYSTEMS: dict[str, dict[str, Any]] = {
    "ddp": {"label": "PyTorch DDP", "color": "tab:blue", "marker": "o"},
    "poseidon": {"label": "Poseidon wrapper", "color": "tab:red", "marker": "s", "linewidth": 2.2},
    "poseidon-distribute": {"label": "poseidon.distribute", "color": "tab:green", "marker": "^", "linewidth": 2.2},
}


def main() -> None:
    """Read the files and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=PICTURE)
    args = parser.parse_args()
    cells = [cell for path in args.results for cell in cells_from_json(json.loads(path.read_text())["cells"])]
    draw(cells, args.output)
    print(f"picture: {args.output}")


def speedups(cells: Sequence[Cell], system: str) -> list[tuple[int, float]]:
    """Return a system's points by number of machines; one machine exchanges nothing, so every line starts at 1."""
    points = {1: 1.0}
    for cell in cells:
        speedup = cell.speedup(system)
        if speedup is not None:
            points[cell.machines] = speedup
    return sorted(points.items())


def wire_bounds(cells: Sequence[Cell]) -> list[tuple[int, float]]:
    """Return the most that any system reaches that sends every gradient in full, at the link's whole speed."""
    points = {1: 1.0}
    for cell in cells:
        linear_ms = cell.systems[LINEAR].step_ms
        points[cell.machines] = cell.machines * linear_ms / max(linear_ms, cell.wire_bound_ms)
    return sorted(points.items())


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draw one panel per model and link speed."""
    panels = list(dict.fromkeys((cell.model, cell.rate_bits) for cell in cells))
    figure, axes = new_figure(len(panels), width=4.6, height=4.0)
    for axis, (model, rate) in zip(axes, panels, strict=False):
        chosen = [cell for cell in cells if (cell.model, cell.rate_bits) == (model, rate)]
        counts = sorted({1, *(cell.machines for cell in chosen)})
        axis.plot(counts, counts, color="grey", linestyle="--", label="linear")
        axis.plot(*zip(*wire_bounds(chosen), strict=True), color="grey", linestyle=":", label="wire, full gradients")
        for system, style in SYSTEMS.items():
            points = speedups(chosen, system)
            if len(points) == len(counts):
                axis.plot(*zip(*points, strict=True), **style)
            elif len(points) > 1:
                # A line over counts that were not measured would look like a result.
                axis.plot(*zip(*points[1:], strict=True), **style, linestyle="none")
        axis.set_xticks(counts)
        axis.set_yticks(range(max(counts) + 1))
        axis.set(xlim=(0.5, max(counts) + 0.3), ylim=(0, max(counts) + 0.3), xlabel="machines", ylabel="speedup")
        axis.set_title(f"{TITLES.get(model, model)}, {format_rate(rate)}", fontsize=11)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
