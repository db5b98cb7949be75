"""The script's current batch, as far as the exchange of gradients needs to know it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from poseidon.auto.weighing import Portion


@dataclass
class ScriptStep:
    """Written when the script gets or uses a batch, read in backward."""

    weight: float = 1.0
    """Factor of this worker's loss: its samples relative to an even share."""
    samples: int = 0
    """First dimension of the batch; 0 if unknown."""
    values: int = 1
    """Number of values in the batch, as a measure of its size."""
    is_shared: bool = False
    """Whether all workers have the same batch."""
    is_dealt: bool = False
    """Whether each worker has its part of the batch."""
    portion: Portion | None = None
    """Which part of the script's batch this worker has, if one was divided."""
    has_dealt: bool = False
    """Whether any loader was dealt out so far."""

    pid: int = field(default_factory=os.getpid)
    """The worker's process."""

    @property
    def is_forked(self) -> bool:
        """Whether this is another process, which the script started by forking: the other workers do not know it."""
        return os.getpid() != self.pid

    def forget(self) -> None:
        """Forget the batch: it is used up."""
        self.weight = 1.0
        self.is_dealt = False
        self.portion = None
