"""What one layer exchanges: the unit, the smallest thing that is planned, sent and updated.

Pure: no tensors, no processes. The engine makes units from a model (``engine/discover.py``), the planner chooses
a route for each (``planning/planner.py``), and a simulator can make them from a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

Kind = Literal["dense", "linear", "embedding", "tied"]


@dataclass(frozen=True)
class ParameterSpec:
    """Name, shape and element size of one parameter."""

    name: str
    """Full name in the model, as in its state dict."""
    shape: tuple[int, ...]
    itemsize: int
    """Bytes per value."""

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameter, which are also the bytes of its gradient."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Unit:
    """The parameters that one module owns."""

    name: str
    """The module's path in the model; "(root)" for the outermost module."""
    kind: Kind
    """Exact forms of the gradient: ``linear`` as a product of factors, ``embedding`` as touched rows, ``tied`` (a table
    that is a linear layer's weight too) as the sum of both."""
    parameters: tuple[ParameterSpec, ...]
    """The weight first, except for dense units."""
    is_sparse: bool = False
    """The user asked for sparse gradients; only the rows route can carry them."""
    is_served: bool = True
    """The parameter server knows the type of its values; only collectives add up others, such as complex numbers."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the unit's full gradient."""
        return sum(p.size_bytes for p in self.parameters)

    @property
    def numel(self) -> int:
        """Values in the unit's full gradient."""
        return sum(p.numel for p in self.parameters)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the weight of a unit that is not dense."""
        rows, columns = self.parameters[0].shape
        return rows, columns


_FINE = 1 << 20
"""Shares are whole numbers of this part on the wire."""


@dataclass(frozen=True)
class Load:
    """A unit's work in one training step on one worker."""

    rows: float
    """Linear and tied: rows of the input (batch times every leading dimension). Embedding: distinct rows touched."""
    value_bytes: int = 4
    """Bytes per value of the factors; 2 under autocast."""
    touched: float = 0.0
    """Tied: distinct rows touched."""
    bags: float = 0.0
    """Embedding: bags of rows, where the rows of each have one gradient in common; 0: every row has its own."""
    filled: float = 1.0
    """Linear: share of the factors' values that are not zero, as far as it is known."""
    WORDS: ClassVar[int] = 4

    def words(self) -> list[int]:
        """Encode for the wire, without bags."""
        return [round(self.rows), self.value_bytes, round(self.touched), round(self.filled * _FINE)]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Load:
        """Decode what :meth:`words` returned on another worker."""
        rows, value_bytes, touched, filled = words
        return cls(rows, value_bytes, touched, filled=filled / _FINE)

    def plus(self, other: Load) -> Load:
        """Return the load of this and other calls."""
        rows, value_bytes = self.rows + other.rows, max(self.value_bytes, other.value_bytes)
        filled = (self.rows * self.filled + other.rows * other.filled) / rows if rows else 1.0
        return Load(rows, value_bytes, self.touched + other.touched, self.bags + other.bags, filled)

    def scaled(self, ratio: float) -> Load:
        """Return the load expected for a batch that is ``ratio`` times as large."""
        return Load(self.rows * ratio, self.value_bytes, self.touched * ratio, self.bags * ratio, self.filled)
