"""How many bits a value takes on its way through the parameter server, by what is known of its layer. Pure.

Autocast computes the gradient of a matrix in half precision. A table's gradient is different: only rows that a step
touched have values, in float32, and the others hold zeros, or what the linear layer with the same weight put there. The
server's sum has values in the rows that any worker touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from poseidon.sums.compact import EMPTY_BITS, compacted_bits
from poseidon.units import Load, Unit

CHANGE_BITS, ROUNDED_CHANGE_BITS = 21.0, 5.0
"""What the change of a weight takes of 32 bits, compacted; rounded to bf16 (docs/decisions/2026-11-16-served.md)."""


def gradient_bits(
    units: Sequence[Unit], loads: Mapping[str, Load], precision: str, workers: int
) -> tuple[float, float]:
    """Return about how many of 32 bits a value of these units takes, compacted, as a part and as the sum of all."""
    every = [_unit_bits(unit, loads.get(unit.name), precision, workers) for unit in units]
    return _mean(units, [part for part, _ in every]), _mean(units, [total for _, total in every])


def _unit_bits(unit: Unit, load: Load | None, precision: str, workers: int) -> tuple[float, float]:
    dense = compacted_bits(precision, workers)
    if load is None or unit.kind not in ("embedding", "tied"):
        return dense
    full = compacted_bits("float32", workers)
    below = dense if unit.kind == "tied" else (EMPTY_BITS, EMPTY_BITS)
    one = min((load.touched if unit.kind == "tied" else load.rows) / unit.matrix[0], 1.0)
    # Workers touch rows independently of each other.
    shares = (one, 1 - (1 - one) ** workers)
    part, total = (share * high + (1 - share) * low for share, high, low in zip(shares, full, below, strict=True))
    return part, total


def change_bits(units: Sequence[Unit], precision: str) -> float:
    """Return about how many of 32 bits a changed weight of these units takes, compacted."""
    return _mean(units, [ROUNDED_CHANGE_BITS if is_rounded(unit, precision) else CHANGE_BITS for unit in units])


def rounded_share(units: Sequence[Unit], precision: str) -> float:
    """Return the share of these units' values that travel in 16 bits as weights."""
    return _mean(units, [float(is_rounded(unit, precision)) for unit in units])


def is_rounded(unit: Unit, precision: str) -> bool:
    """Return whether only the bf16 form of a unit's weights is used under autocast.

    The first forward shows it in training; here it follows from the shapes. Autocast rounds what products read,
    matrices and kernels with their biases; tables and the vectors of norms are read as they are, but of a table that is
    a linear layer's weight too, look-ups fetch just their rows.
    """
    if precision != "bf16" or unit.kind == "embedding":
        return False
    return any(len(parameter.shape) > 1 and parameter.itemsize == 4 for parameter in unit.parameters)


def _mean(units: Sequence[Unit], values: Sequence[float]) -> float:
    numel = [unit.numel for unit in units]
    return sum(count * value for count, value in zip(numel, values, strict=True)) / max(sum(numel), 1)
