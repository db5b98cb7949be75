"""The results of a benchmark, as pure data: medians, bounds, speedups, whether losses agree, and the table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from poseidon.lab.spec import UNSHAPED, format_rate
from poseidon.lab.system_names import traits_of
from poseidon.planning.profile import Profile

LINEAR = "linear"
# How far the losses of two exact systems may end apart, as a fraction of the loss's total change: rounding differences
# from another order of additions and from TF32 grow with every step, while a wrong mean gradient is off by about 1.
LOSS_TOLERANCE = 0.05


@dataclass(frozen=True)
class Repetition:
    """One measured block of steps of one system, over all ranks."""

    step_ms: float
    """Wall time of the slowest rank, per step."""
    sent_bytes: float
    """Bytes a machine sent per step, mean over machines."""
    first_loss: float
    """Mean over ranks, before any update."""
    last_loss: float
    """Mean over ranks, after all warm-up and measured steps, or the first 14 of them."""
    laps_ms: tuple[float, ...] = ()
    """Each step of the slowest rank by itself, as its device computed it; empty in old files."""

    def __post_init__(self) -> None:
        # A file has lists.
        object.__setattr__(self, "laps_ms", tuple(self.laps_ms))


@dataclass(frozen=True)
class Measured:
    """One system in one cell: its repetitions, or why there are none."""

    repetitions: tuple[Repetition, ...] = ()
    failure: str = ""
    note: str = ""
    """The system's own remarks, such as the routes it chose."""
    predicted_ms: float | None = None
    """The simulator's prediction, from the linear system's computation alone."""

    @property
    def step_ms(self) -> float:
        """Time of a step: the mean within a repetition, the median over repetitions."""
        return median(repetition.step_ms for repetition in self.repetitions)

    @property
    def lap_ms(self) -> float | None:
        """Median of all single steps, which one stall of a busy host does not change; None for old files."""
        laps = [lap for repetition in self.repetitions for lap in repetition.laps_ms]
        return median(laps) if laps else None

    @property
    def spread_ms(self) -> tuple[float, float]:
        """Fastest and slowest repetition."""
        times = [repetition.step_ms for repetition in self.repetitions]
        return min(times), max(times)

    @property
    def sent_bytes(self) -> float:
        """Median of the bytes a machine sends per step."""
        return median(repetition.sent_bytes for repetition in self.repetitions)

    @property
    def last_loss(self) -> float:
        """Loss after the same steps from the same seed; the first repetition's, as all should agree."""
        return self.repetitions[0].last_loss


@dataclass(frozen=True)
class Cell:
    """Every system on one model, number of machines and link speed."""

    model: str
    machines: int
    rate_bits: int
    batch: int
    """Samples per worker and step."""
    parameters: int
    parameter_bytes: int
    systems: Mapping[str, Measured] = field(default_factory=dict)
    profile: Profile | None = None
    """What each unit computes, as measured on one worker while all compute; None in old files..."""
    flops: float = 0.0
    """... and one worker's matrix rate then."""

    @property
    def wire_bound_ms(self) -> float:
        """Time of an allreduce of all gradients at full link speed."""
        return wire_bound_ms(self.parameter_bytes, self.machines, self.rate_bits)

    def speedup(self, system: str) -> float | None:
        """Return how many machines' worth of work a system does; the linear bound is all of them."""
        linear, measured = self.systems.get(LINEAR), self.systems.get(system)
        if linear is None or measured is None or not linear.repetitions or not measured.repetitions:
            return None
        return self.machines * linear.step_ms / measured.step_ms

    def verdict(self, system: str) -> str:
        """Return ``ok``, ``lossy``, ``WRONG`` or ``failed``; empty without a reference."""
        measured = self.systems[system]
        if not measured.repetitions:
            return "failed"
        if system == LINEAR:
            return ""
        if not traits_of(system).is_exact:
            return "lossy"
        reference = self._reference(system)
        if reference is None:
            return ""
        return "ok" if losses_agree(measured.repetitions, reference) else "WRONG"

    def _reference(self, system: str) -> Repetition | None:
        """Return the reference for an exact system's loss: plain DDP, or else the first other exact system."""
        exact = [name for name in self.systems if name != LINEAR and traits_of(name).is_exact]
        for name in sorted(exact, key=lambda name: name != "ddp"):
            if (name != system or name == "ddp") and self.systems[name].repetitions:
                return self.systems[name].repetitions[0]
        return None


def wire_bound_ms(parameter_bytes: int, machines: int, rate_bits: int) -> float:
    """Return the least time for every machine to send and receive 2 (P-1)/P of the parameters' bytes."""
    if rate_bits == UNSHAPED:
        return 0.0
    return 2 * (machines - 1) / machines * parameter_bytes * 8 / rate_bits * 1e3


def losses_agree(repetitions: Iterable[Repetition], reference: Repetition) -> bool:
    """Return whether all repetitions began and ended at the reference's losses, within the tolerance."""
    way = abs(reference.last_loss - reference.first_loss)
    room = LOSS_TOLERANCE * way + 1e-4 * abs(reference.first_loss)
    return all(
        abs(repetition.first_loss - reference.first_loss) <= room
        and abs(repetition.last_loss - reference.last_loss) <= room
        for repetition in repetitions
    )


def cells_to_json(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return plain data for a file: the measurements and, for readers, the figures derived from them."""
    return [_cell_to_json(cell) for cell in cells]


def cells_from_json(data: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """Return the cells in a file; derived figures are recomputed."""
    return [_cell_from_json(entry) for entry in data]


def format_table(cell: Cell) -> str:
    """Return a cell as lines for the screen."""
    title = (
        f"{cell.model}: {cell.parameters / 1e6:.1f}M parameters, batch {cell.batch}, {cell.machines} machines at "
        f"{format_rate(cell.rate_bits)}; wire bound of an allreduce {cell.wire_bound_ms:.1f} ms"
    )
    head = (
        f"  {'system':<14}{'ms/step':>10}{'min .. max':>20}{'median':>10}{'speedup':>9}{'sent MB/step':>14}{'loss':>12}"
        f"{'predicted':>11}  check"
    )
    rows = [_format_row(cell, system, measured) for system, measured in cell.systems.items()]
    return "\n".join([title, head, *rows])


def _format_row(cell: Cell, system: str, measured: Measured) -> str:
    if not measured.repetitions:
        return f"  {system:<14}{'-':>10}  failed: {measured.failure}"
    low, high = measured.spread_ms
    speedup = cell.speedup(system)
    return (
        f"  {system:<14}{measured.step_ms:>10.1f}{f'{low:.1f} .. {high:.1f}':>20}"
        f"{'-' if measured.lap_ms is None else f'{measured.lap_ms:.1f}':>10}"
        f"{'-' if speedup is None else f'{speedup:.2f}x':>9}{measured.sent_bytes / 1e6:>14.2f}"
        f"{measured.last_loss:>12.5f}"
        f"{'-' if measured.predicted_ms is None else f'{measured.predicted_ms:.1f}':>11}"
        f"  {cell.verdict(system)}".rstrip()
    )


def _cell_to_json(cell: Cell) -> dict[str, Any]:
    plain = asdict(replace(cell, profile=None))
    if cell.profile is not None:
        # As text: one line instead of thousands.
        plain["profile"] = json.dumps(cell.profile.to_dict())
    plain["wire_bound_ms"] = round(cell.wire_bound_ms, 3)
    for system, measured in cell.systems.items():
        if measured.repetitions:
            plain["systems"][system] |= {
                "step_ms": measured.step_ms,
                "lap_ms": measured.lap_ms,
                "spread_ms": measured.spread_ms,
                "sent_bytes": measured.sent_bytes,
                "last_loss": measured.last_loss,
                "speedup": cell.speedup(system),
                "verdict": cell.verdict(system),
            }
    return plain


def _cell_from_json(data: Mapping[str, Any]) -> Cell:
    systems = {
        name: Measured(
            tuple(Repetition(**entry) for entry in system["repetitions"]),
            system["failure"],
            system["note"],
            system.get("predicted_ms"),
        )
        for name, system in data["systems"].items()
    }
    plain = ("model", "machines", "rate_bits", "batch", "parameters", "parameter_bytes")
    profile = data.get("profile")
    return Cell(
        **{name: data[name] for name in plain},
        systems=systems,
        profile=None if profile is None else Profile.from_dict(json.loads(profile)),
        flops=data.get("flops", 0.0),
    )
