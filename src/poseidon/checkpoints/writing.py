"""A thread that writes checkpoints one after the other while training goes on."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from poseidon.checkpoints.claiming import Claim
from poseidon.checkpoints.folder import CheckpointFolder
from poseidon.errors import ConfigError
from poseidon.job.closing import Stage, at_exit


class CheckpointWriter:
    """Writes to a folder. One checkpoint may wait while another is written; a third is waited for.

    What cannot be written ends nothing: it is told at the next :meth:`put` or :meth:`finish`, and the checkpoints that
    are there stay.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._jobs: queue.Queue[tuple[int, Mapping[str, Any]] | None] = queue.Queue(maxsize=1)
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._claim: Claim | None = None
        """None before the first checkpoint."""
        self._thread = threading.Thread(target=self._work, name="poseidon-checkpoints", daemon=True)
        self._thread.start()
        # A checkpoint that is being written is completed before the process ends.
        self._cancel = at_exit(Stage.STEPS, self.close)

    def claim(self) -> None:
        """Be the one that writes to the folder; :class:`ConfigError` if that is another job."""
        if self._claim is None:
            self._claim = Claim(self._folder.path)

    def put(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint soon; its tensors must not change any more."""
        self._tell()
        self._jobs.put((step, state))

    def finish(self) -> None:
        """Wait until everything is written."""
        self._jobs.join()
        self._tell()

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._cancel()
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
        if self._claim is not None:
            self._claim.release()
        self._tell()

    def _tell(self) -> None:
        while not self._problems.empty():
            warnings.warn(self._problems.get(), stacklevel=4)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            step, state = job
            try:
                self._folder.write(step, state)
            except ConfigError as error:
                self._problems.put(f"the checkpoint of step {step} is not written: {error}; training goes on")
            except Exception as error:
                kind = type(error).__name__
                self._problems.put(f"the checkpoint of step {step} is not written: {kind}: {error}; training goes on")
            finally:
                del job, state
                self._jobs.task_done()
        self._jobs.task_done()
