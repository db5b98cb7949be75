"""What users ask for when they allow loss: which layers, which way, how much of it. Pure.

Nothing here is chosen unasked. ``routes/lossy.py`` has the routes, ``docs/lossy.md`` says what each costs.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poseidon.errors import ConfigError, unknown_name
from poseidon.planning.numbers import count_from, real_number
from poseidon.planning.route import Routes
from poseidon.units import Unit

EXACT = "exact"
"""In place of a way to lose something: none."""
LOSSY = ("bf16", "int8", "topk", "lowrank")
DEFAULT_RANK = 4
DEFAULT_DENSITY = 0.01
DEFAULT_BLOCK = 256
_LEAST_BLOCK, _MOST_BLOCK = 32, 1 << 18
"""The most are the values of a chunk, of which each is encoded by itself."""
_LEAST_SAVING = 2
"""A matrix travels in low rank if that makes it at least this many times shorter."""


@dataclass(frozen=True)
class LossyChoice:
    """Which layers may lose how much; equal on all workers."""

    patterns: tuple[tuple[str, str], ...]
    """Unit names or patterns, each with one of :data:`LOSSY` or :data:`EXACT`; the first that matches counts."""
    rank: int = DEFAULT_RANK
    density: float = DEFAULT_DENSITY
    block_size: int = DEFAULT_BLOCK
    warmup_steps: int = 0
    """Steps at the beginning of a job in which nothing is lost."""

    def way_of(self, name: str) -> str:
        """Return how a unit may travel."""
        return next((way for pattern, way in self.patterns if fnmatch.fnmatchcase(name, pattern)), EXACT)

    def forced(self, units: Sequence[Unit], routes: Routes) -> dict[str, str]:
        """Return the lossy route of each unit that has one. Raises :class:`ConfigError` for a pattern without effect.

        A unit that its route cannot carry, such as a table with sparse gradients, stays exact.
        """
        for pattern, way in self.patterns:
            matched = [unit for unit in units if fnmatch.fnmatchcase(unit.name, pattern)]
            if not matched:
                names = ", ".join(unit.name for unit in units[:8]) + (", ..." if len(units) > 8 else "")
                raise ConfigError(f"lossy: no unit matches {pattern!r}; the model's units are {names}")
            if way != EXACT and not any(routes[way].accepts(unit) for unit in matched):
                raise ConfigError(
                    f"lossy: {pattern!r} cannot take {way!r}: {matched[0].name} and what else it matches have "
                    f"{routes[way].refuses}; leave it exact"
                )
        ways = {unit.name: self.way_of(unit.name) for unit in units}
        return {unit.name: ways[unit.name] for unit in units if _carries(routes, ways[unit.name], unit)}

    def __str__(self) -> str:
        first = f", after {self.warmup_steps} exact steps" if self.warmup_steps else ""
        return ", ".join(f"{pattern}: {way}" for pattern, way in self.patterns) + first


def _carries(routes: Routes, way: str, unit: Unit) -> bool:
    return way != EXACT and routes[way].accepts(unit)


def read_lossy(
    lossy: str | Mapping[str, str] | None,
    rank: int | None = None,
    density: float | None = None,
    block_size: int | None = None,
    warmup_steps: int | None = None,
) -> LossyChoice | None:
    """Return a user's choice, or None if everything is exact. Raises :class:`ConfigError` for one that cannot work."""
    if lossy is not None and not isinstance(lossy, str | Mapping):
        raise ConfigError(f"lossy is {lossy!r}; give one of {', '.join(LOSSY)}, or a dict of unit patterns to these")
    patterns = {"*": lossy} if isinstance(lossy, str) else dict(lossy or {})
    for way in patterns.values():
        if way not in (*LOSSY, EXACT):
            raise unknown_name("way to lose something", str(way), (*LOSSY, EXACT))
    used = set(patterns.values())
    columns = count_from(1, rank)
    _check_option("rank", rank, "lowrank", used, columns is not None, "a whole number of at least 1")
    share = real_number(density)
    is_share = share is not None and 0 < share <= 0.5
    _check_option("density", density, "topk", used, is_share, "a share of all values, above 0 and at most 0.5")
    block = count_from(_LEAST_BLOCK, block_size)
    is_block = block is not None and block <= _MOST_BLOCK and block % 2 == 0
    numbers = f"an even number from {_LEAST_BLOCK} to {_MOST_BLOCK}"
    _check_option("block_size", block_size, "int8", used, is_block, numbers)
    exact_steps = 0 if warmup_steps is None else read_warmup(warmup_steps)
    if not used - {EXACT}:
        if warmup_steps is not None:
            raise ConfigError(
                f"warmup_steps={warmup_steps!r} without lossy: exact steps come before lossy or local ones; add "
                'lossy="lowrank", say, or drop warmup_steps'
            )
        return None
    return LossyChoice(
        tuple(patterns.items()),
        DEFAULT_RANK if columns is None else columns,
        DEFAULT_DENSITY if share is None else share,
        DEFAULT_BLOCK if block is None else block,
        exact_steps,
    )


def read_warmup(warmup_steps: object) -> int:
    """Return how many exact steps come first. Raises :class:`ConfigError` for a number that no job would reach."""
    count = count_from(0, warmup_steps)
    if count is None:
        raise ConfigError(f"warmup_steps is {warmup_steps!r}; expected a whole number of at least 0")
    return count


def _check_option(name: str, value: object, way: str, used: set[str], is_valid: bool, expected: str) -> None:
    if value is None:
        return
    if way not in used:
        raise ConfigError(f"{name}={value!r} is for lossy={way!r}, which is not asked for; add that or drop {name}")
    if not is_valid:
        raise ConfigError(f"{name}={value!r} with lossy={way!r}: expected {expected}")


def as_matrix(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Return the rows and columns as which a tensor travels in low rank: its first dimension, and all others.

    None if that would save little: it travels as it is.
    """
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    if _LEAST_SAVING * rank * (rows + columns) > rows * columns:
        return None
    return rows, columns
