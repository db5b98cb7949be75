"""The picture of time to a loss: validation loss over seconds on the cluster, one line per system."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from poseidon.errors import ConfigError
from poseidon.lab.loss_results import Comparison, outline, smooth
from poseidon.lab.picture import FURTHER, STYLES, save
from poseidon.lab.spec import format_rate


def draw_losses(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write a picture with a panel per comparison; raises :class:`ConfigError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed; pip install matplotlib, or draw elsewhere with `poseidon bench --plot`"
        ) from None
    drawn = [one for one in comparisons if any(one.runs_of(system) for system in one.systems)]
    if not drawn:
        raise ConfigError("no run has a curve to draw")
    figure = Figure(figsize=(6.4 * len(drawn), 4.4), layout="constrained")
    for axis, comparison in zip(figure.subplots(1, len(drawn), squeeze=False).flatten(), drawn, strict=True):
        _draw_panel(axis, comparison)
    save(figure, path)


def _draw_panel(axis: object, comparison: Comparison) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    further = itertools.cycle(FURTHER)
    targets = []
    for system in comparison.systems:
        colour = STYLES.get(system, {}).get("color") or next(further)
        label: str | None = _label(comparison, system)
        for run in comparison.runs_of(system):
            marks = [mark for mark in smooth(run.marks) if mark.seconds]
            axis.plot([m.seconds or 0.0 for m in marks], [m.loss for m in marks], color=colour, label=label, alpha=0.8)
            # One entry of the legend for all seeds.
            label = None
            target = comparison.target_of(run.seed)
            if target is not None:
                targets.append(target)
    for target in set(targets):
        axis.axhline(target, color="grey", linestyle=":", linewidth=1)
    axis.set_xscale("log")
    axis.set_title(f"{comparison.lesson}, {comparison.machines} machines at {format_rate(comparison.rate_bits)}")
    axis.set_xlabel("seconds")
    axis.set_ylabel("validation loss (dotted: targets)")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize="small")


def _label(comparison: Comparison, system: str) -> str:
    row = outline(comparison, system)
    if row.speedup is None:
        return f"{system}: target not reached"
    return system if system == "ddp" else f"{system}: {row.speedup:.1f}x"
