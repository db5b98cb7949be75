"""A hook for a clean stop: after Ctrl-C (or SIGTERM) a training loop can save its state before it ends.

::

    from poseidon.launch.stopping import Stopping

    with Stopping() as stop:
        for step, batch in enumerate(loader):
            train(batch)
            if stop.agreed():      # all workers get the same answer at the same step
                save_checkpoint(step)
                break

Without it workers get a KeyboardInterrupt wherever they are, as in a script that runs alone.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """A context manager that notes requests to stop instead of being interrupted by them.

    Only the main thread receives signals. If the loop runs on another one, as in Ray's workers, whoever started it
    stops it in its own way, and :meth:`agreed` stays False.

    :meth:`agreed` asks the other workers only once in ``every`` calls, since that is a small collective operation.
    """

    def __init__(self, every: int = 1) -> None:
        self.is_requested = False
        """Whether this worker was asked to stop; others may not have been yet."""
        self.number = 0
        """The signal that asked; 0: none."""
        self._every = max(1, every)
        self._calls = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Return whether any worker was asked to stop. Collective: all must call it at the same step."""
        self._calls += 1
        if self._calls % self._every:
            return False
        import torch
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return self.is_requested
        is_nccl = dist.get_backend() == "nccl"
        asked = torch.tensor([float(self.is_requested)], device="cuda" if is_nccl else "cpu")
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked.item() > 0)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.is_requested = True
        self.number = number
