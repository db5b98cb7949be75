"""Simulations as pictures: speedups over machines, and one machine's timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poseidon.errors import ConfigError
from poseidon.planning.cluster import format_rate
from poseidon.sim.outcome import Outcome, Span
from poseidon.sim.sweep import Point

PANELS_PER_ROW = 3
STEPS_SHOWN = 2
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
    "served": {"color": "tab:pink", "marker": "P", "linewidth": 2.2},
}

NAMES = {
    "linear": "linear",
    "ring": "allreduce after backward",
    "ddp": "PyTorch DDP",
    "ps": "parameter server",
    "dwbp-ps": "parameter server, overlapped",
    "adam": "Project Adam",
    "poseidon-2017": "Poseidon, 2017",
    "poseidon": "Poseidon",
    "distribute": "poseidon.distribute",
    "served": "poseidon.distribute, server's step",
}
"""Display names of the systems."""

PHASES = {
    "forward": ("tab:blue", "forward"),
    "backward": ("tab:orange", "backward"),
    "rebuild": ("tab:purple", "multiplying factors"),
    "update": ("tab:green", "optimizer"),
}
"""What a device does: colour and label."""
NETWORK = ("tab:red", "sending gradients")
WAITING = ("0.9", "waiting for the network")


def new_figure(
    panels: int, width: float = 4.6, height: float = 4.0, columns: int = PANELS_PER_ROW
) -> tuple[Any, list[Any]]:
    """Return a figure and its axes; raises :class:`ConfigError` where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib is not installed; pictures need it: pip install matplotlib") from None
    columns = min(panels, columns)
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
    handles, labels = axes[0].get_legend_handles_labels()
    # Below the panels: inside one, it would cover lines.
    figure.legend(handles, labels, ncols=min(4, len(labels)), loc="outside lower center", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def draw_timelines(outcomes: Mapping[str, Outcome], path: Path, title: str) -> None:
    """Draw two steps of the first machine's device and network, one panel per system, all on one scale."""
    figure, axes = new_figure(len(outcomes), width=9.0, height=1.45, columns=1)
    longest_ms = max(outcome.step_s for outcome in outcomes.values()) * STEPS_SHOWN * 1e3
    for axis, (name, outcome) in zip(axes, outcomes.items(), strict=True):
        _draw_timeline(axis, outcome)
        axis.set_xlim(0, longest_ms)
        axis.set_title(f"{NAMES.get(name, name)}: {outcome.step_s * 1e3:.0f} ms per step", fontsize=10, loc="left")
        if axis is not axes[-1]:
            axis.set_xticklabels([])
    axes[-1].set_xlabel("milliseconds")
    handles = [_patch(*pair) for pair in (*PHASES.values(), WAITING, NETWORK)]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def _draw_timeline(axis: Any, outcome: Outcome) -> None:
    """Draw computation above and the network below, with a line where each step ends."""
    end_s = outcome.step_s * STEPS_SHOWN
    ends_ms = [outcome.step_s * step * 1e3 for step in range(1, STEPS_SHOWN + 1)]
    axis.broken_barh([(0, end_s * 1e3)], (0.65, 0.7), facecolor=WAITING[0])
    for phase, (colour, _) in PHASES.items():
        _draw_bars(axis, 1.0, colour, [span for span in outcome.spans if span.route == phase], end_s)
    _draw_bars(axis, 0.0, NETWORK[0], [span for span in outcome.spans if span.place == "out"], end_s)
    axis.vlines(ends_ms, -0.5, 1.5, colors="black", linestyles="dotted", linewidth=1)
    axis.set_yticks((0.0, 1.0), ("network", "GPU"))
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(-0.5, 1.5)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_bars(axis: Any, row: float, colour: str, spans: Sequence[Span], until_s: float) -> None:
    shown = [(span.start_s, min(span.end_s, until_s)) for span in spans if span.start_s < until_s]
    bars = [(start * 1e3, (end - start) * 1e3) for start, end in shown]
    axis.broken_barh(bars, (row - 0.35, 0.7), facecolor=colour)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _save(figure: Any, path: Path) -> None:
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
        axis.plot(*zip(*line, strict=True), label=NAMES.get(system, system), **STYLES.get(system, {}))
    if len(counts) > 2 and counts[-1] / counts[0] >= 8:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_yticks(counts, [str(count) for count in counts])
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_xlabel("machines")
    axis.set_ylabel("speedup")
    axis.grid(alpha=0.3)
