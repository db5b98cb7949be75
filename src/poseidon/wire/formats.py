"""Number formats that can be summed: how values are stored on the wire, and in which type they are added. Pure.

Half-precision values are added in float32 and rounded once at the end, so the result does not depend on how large the
partial sums become.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from poseidon.errors import unknown_name

Array = np.ndarray[Any, Any]


def _same(values: Array) -> Array:
    return values


def _widen_half(values: Array) -> Array:
    return values.astype(np.float32)


def _narrow_half(values: Array) -> Array:
    # A sum beyond float16's range becomes infinite, as in any float16 addition.
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _widen_bfloat16(bits: Array) -> Array:
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _narrow_bfloat16(values: Array) -> Array:
    """Round float32 to the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    odd = (bits >> 16) & 1
    with np.errstate(over="ignore"):
        rounded = ((bits + odd + 0x7FFF) >> 16).astype(np.uint16)
    # Rounding up could carry a NaN's payload into the sign bit, so all NaNs become one quiet NaN.
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


@dataclass(frozen=True)
class Format:
    """One number format."""

    name: str
    stored: np.dtype[Any]
    """The type that travels; NumPy has no bfloat16, so its bits travel as unsigned integers."""
    summed: np.dtype[Any]
    """The type in which values are added."""
    widen: Callable[[Array], Array]
    """From stored to summed; may return its argument."""
    narrow: Callable[[Array], Array]
    """From summed to stored; may return its argument."""

    @property
    def rounds(self) -> bool:
        """Whether :attr:`narrow` loses bits."""
        return self.stored != self.summed


FORMATS = {
    f.name: f
    for f in (
        Format("float32", np.dtype(np.float32), np.dtype(np.float32), _same, _same),
        Format("float64", np.dtype(np.float64), np.dtype(np.float64), _same, _same),
        Format("float16", np.dtype(np.float16), np.dtype(np.float32), _widen_half, _narrow_half),
        Format("bfloat16", np.dtype(np.uint16), np.dtype(np.float32), _widen_bfloat16, _narrow_bfloat16),
    )
}


def find_format(name: str) -> Format:
    """Return the format called ``name``; for an unknown one, raise ``ConfigError`` with the known ones."""
    if name not in FORMATS:
        raise unknown_name("number format", name, tuple(FORMATS))
    return FORMATS[name]
