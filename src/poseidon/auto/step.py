"""The batch that the script is working on, as far as the exchange of gradients must know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Step:
    """Written by the loaders with every batch, read in backward."""

    weight: float = 1.0
    """Factor of this worker's loss: its samples in relation to an even share."""
    samples: int = 0
    """First dimension of the batch; 0 if it is not known."""
    values: int = 1
    """Numbers in the batch, which stand for its size."""
    is_shared: bool = False
    """Whether all workers were given this same batch."""
    has_dealt: bool = False
    """Whether any loader was dealt out so far."""
