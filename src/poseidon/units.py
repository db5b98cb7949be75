"""What one layer exchanges: the unit, the smallest thing that is planned, sent and updated.

Pure: no tensors, no processes. The engine makes units from a model (``engine/discover.py``), the planner chooses
a route for each (``planning/planner.py``), and a simulator can make them from a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["dense", "linear", "embedding"]


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
    """Exact forms of the gradient: ``linear`` as a product of factors, ``embedding`` as touched rows."""
    parameters: tuple[ParameterSpec, ...]
    """The weight first, for linear and embedding units."""
    is_sparse: bool = False
    """The user asked for sparse gradients; only the rows route can carry them."""

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
        """Rows and columns of the weight of a linear or embedding unit."""
        rows, columns = self.parameters[0].shape
        return rows, columns


@dataclass(frozen=True)
class Load:
    """A unit's work in one training step on one worker."""

    rows: float
    """Linear: rows of the input (batch times every leading dimension). Embedding: distinct rows touched."""
    value_bytes: int = 4
    """Bytes per value of the factors; 2 under autocast."""
