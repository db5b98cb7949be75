"""The picture of a benchmark: speedup over machines, one line per system, one panel per model and link speed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poseidon.errors import ConfigError
from poseidon.lab.results import LINEAR, Cell
from poseidon.lab.spec import format_rate
from poseidon.lab.system_names import traits_of

PANELS_PER_ROW = 3
STYLES: dict[str, dict[str, Any]] = {
    LINEAR: {"color": "grey", "linestyle": "--"},
    "ddp": {"color": "tab:blue", "marker": "o"},
    "ddp-gloo": {"color": "tab:cyan", "marker": "v"},
    "ddp-bf16": {"color": "tab:green", "marker": "s"},
    "ddp-powersgd": {"color": "tab:olive", "marker": "^"},
    "poseidon": {"color": "tab:red", "marker": "o", "linewidth": 2.2},
    "poseidon-distribute": {"color": "tab:purple", "marker": "*", "linewidth": 2.2},
}
FURTHER = ("tab:orange", "tab:brown", "tab:pink", "black")
"""Colours of systems with options, in turn."""


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Write a picture of the cells; raises :class:`ConfigError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed; pip install matplotlib, or draw elsewhere with `poseidon bench --plot`"
        ) from None
    cells = [cell for cell in cells if speedup_lines([cell])]
    if not cells:
        raise ConfigError("no cell has a linear bound to draw speedups against")
    panels = sorted({(cell.model, cell.rate_bits) for cell in cells}, key=lambda key: (key[1], key[0]))
    columns = min(len(panels), PANELS_PER_ROW)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 4.0 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (model, rate) in zip(axes, panels, strict=False):
        _draw_panel(axis, model, rate, [cell for cell in cells if (cell.model, cell.rate_bits) == (model, rate)])
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format that the file's name ends in; raises :class:`ConfigError` where that fails."""
    try:
        # Named, or another ending would be added to a name without one.
        figure.savefig(path, dpi=130, format=path.suffix.removeprefix(".").lower() or "png")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def speedup_lines(cells: Sequence[Cell]) -> dict[str, list[tuple[int, float]]]:
    """Return each system's speedups by number of machines, in order; the linear bound comes first."""
    systems = list(dict.fromkeys(system for cell in cells for system in cell.systems))
    lines: dict[str, list[tuple[int, float]]] = {}
    for system in sorted(systems, key=lambda system: system != LINEAR):
        points = [(cell.machines, cell.speedup(system)) for cell in cells if system in cell.systems]
        known = sorted((machines, speedup) for machines, speedup in points if speedup is not None)
        if known:
            # A single machine has nothing to exchange: every line starts there.
            lines[system] = [(1, 1.0), *known]
    return lines


def _draw_panel(axis: object, model: str, rate: int, cells: Sequence[Cell]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    further = itertools.cycle(FURTHER)
    for system, points in speedup_lines(cells).items():
        machines, speedups = zip(*points, strict=True)
        label = f"{system} (lossy)" if not traits_of(system).is_exact else system
        axis.plot(machines, speedups, label=label, **(STYLES.get(system) or {"marker": "x", "color": next(further)}))
    ticks = sorted({1, *(cell.machines for cell in cells)})
    axis.set_xticks(ticks)
    axis.set_xlim(0, max(ticks) * 1.05)
    axis.set_ylim(0, max(ticks) * 1.05)
    axis.set_title(f"{model}, {format_rate(rate)}")
    axis.set_xlabel("machines")
    axis.set_ylabel("speedup")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
