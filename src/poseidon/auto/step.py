"""The script's current batch, as far as the exchange of gradients needs to know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ScriptStep:
    """Written by the loaders with every batch, read in backward."""

    weight: float = 1.0
    """Factor of this worker's loss: its samples relative to an even share."""
    samples: int = 0
    """First dimension of the batch; 0 if unknown."""
    values: int = 1
    """Number of values in the batch, as a measure of its size."""
    is_shared: bool = False
    """Whether all workers have the same batch."""
    has_dealt: bool = False
    """Whether any loader was dealt out so far."""
