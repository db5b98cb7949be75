"""Speedup over machines as a picture: one line per system, one panel per link speed and batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poseidon.errors import ConfigError
from poseidon.planning.cluster import format_rate
from poseidon.sim.sweep import Point

PANELS_PER_ROW = 3
STYLES: dict[str, dict[str, Any]] = {
    "linear": {"color": "grey", "linestyle": "--"},
    "ring": {"color": "tab:cyan", "marker": "v"},
    "ddp": {"color": "tab:blue", "marker": "o"},
    "ps": {"color": "tab:brown", "marker": "s"},
    "dwbp-ps": {"color": "tab:orange", "marker": "^"},
    "adam": {"color": "tab:olive", "marker": "x"},
    "poseidon-2017": {"color": "tab:purple", "marker": "D"},
    "poseidon": {"color": "tab:red", "marker": "o", "linewidth": 2.2},
    "distribute": {"color": "tab:green", "marker": "*", "linewidth": 2.2},
}


def new_figure(panels: int, width: float = 4.6, height: float = 4.0) -> tuple[Any, list[Any]]:
    """Return a figure and its axes; raises :class:`ConfigError` where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed; install poseidon-dl[lab] for pictures") from None
    columns = min(panels, PANELS_PER_ROW)
    rows = -(-panels // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for axis in axes[panels:]:
        axis.set_axis_off()
    return figure, axes


def draw_speedups(points: Sequence[Point], path: Path, title: str) -> None:
    """Write the picture of a sweep."""
    panels = list(dict.fromkeys((point.batch, point.rate_bits) for point in points))
    figure, axes = new_figure(len(panels))
    for axis, (batch, rate) in zip(axes, panels, strict=False):
        chosen = [point for point in points if (point.batch, point.rate_bits) == (batch, rate)]
        _draw_panel(axis, chosen)
        axis.set_title(f"{format_rate(rate)}, batch {batch} per worker", fontsize=10)
    figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _draw_panel(axis: Any, points: Sequence[Point]) -> None:
    counts = sorted({point.machines for point in points})
    axis.plot(counts, counts, label="linear", **STYLES["linear"])
    for system in dict.fromkeys(point.system for point in points):
        if system == "linear":
            continue
        line = sorted((point.machines, point.outcome.speedup) for point in points if point.system == system)
        axis.plot(*zip(*line, strict=True), label=system, **STYLES.get(system, {}))
    if len(counts) > 2 and counts[-1] / counts[0] >= 8:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_yticks(counts, [str(count) for count in counts])
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_xlabel("machines")
    axis.set_ylabel("speedup")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
