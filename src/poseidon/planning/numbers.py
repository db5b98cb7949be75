"""Numbers that users give as options: Python's own and NumPy's, but no truth values. Pure.

What is returned is Python's own: it is compared, saved and sent to other workers.
"""

from __future__ import annotations

import math
import numbers


def whole_number(value: object) -> int | None:
    """Return the whole number that ``value`` is, if it is one."""
    if isinstance(value, bool):
        return None
    return int(value) if isinstance(value, numbers.Integral) else None


def real_number(value: object) -> float | None:
    """Return the finite number that ``value`` is, if it is one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def count_from(least: int, value: object) -> int | None:
    """Return the whole number of at least ``least`` that ``value`` is, if it is one."""
    number = whole_number(value)
    return number if number is not None and number >= least else None
