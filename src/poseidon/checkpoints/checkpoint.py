"""``poseidon.Checkpoint``: a job that goes on where it ended, whoever ended it and on however many workers.

::

    with poseidon.Checkpoint("saved", every=500, model=model, optimizer=optimizer) as checkpoint:
        for step in range(checkpoint.resume(), steps):
            train(step)
            checkpoint.step(step + 1)

One worker copies the states and writes them on a thread of its own. Whoever has the newest intact checkpoint on its
disk hands it to all others, so no shared disk is needed.

In an elastic job :meth:`Checkpoint.run` calls a training function again whenever workers are lost or join, with
everything as it was after the last complete step, which every worker keeps in memory.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from poseidon.checkpoints.ending import EndRequests
from poseidon.checkpoints.folder import CheckpointFolder
from poseidon.checkpoints.lasting import LastingRun
from poseidon.checkpoints.program import ProgramState
from poseidon.checkpoints.saving import Saving
from poseidon.checkpoints.sharing import HandedOver
from poseidon.checkpoints.states import Stateful
from poseidon.errors import ConfigError, WorkerLostError
from poseidon.job.elastic import this_job
from poseidon.job.limits import time_limit
from poseidon.team.watch import count_alone


class Checkpoint:
    """Saves and restores everything that a training program needs to go on. Construction is collective.

    ``parts`` are the program's objects by name: anything with ``state_dict()`` and ``load_state_dict()``. They are
    taken to be equal on all workers, and rank 0's are saved; of those in ``per_worker`` each worker's own is, and of
    all of them if a model among them takes local steps. The random numbers of Python, NumPy and torch are saved for
    each worker without being named, and so is what a model distributed with ``lossy`` keeps.

    Without a ``folder`` nothing is written to disk; an elastic job still goes on from memory.

    A checkpoint is written after every ``every`` steps or ``every_s`` seconds, and the newest ``keep`` stay. A worker
    that gets SIGTERM or SIGINT first completes the step, on all workers, and saves; then all end with the status of
    that signal (``on_signal=False`` leaves signals alone).

    In an elastic job with ``update="server"``, what one worker alone has is also kept on ``replicas`` other machines.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        every: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        on_signal: bool = True,
        replicas: int = 1,
        per_worker: Mapping[str, Stateful] | None = None,
        timeout_s: float | None = None,
        **parts: Stateful,
    ) -> None:
        _check_amount("every", every, 1)
        _check_amount("every_s", every_s, 0.0)
        _check_amount("keep", keep, 1)
        _check_amount("replicas", replicas, 1)
        self._program = ProgramState(parts, per_worker or {})
        if folder is None and (every is not None or every_s is not None):
            raise ConfigError("checkpoint: every and every_s need a folder to write to")
        kept = None if folder is None else CheckpointFolder(folder, keep)
        self._every = every
        self._every_s = every_s
        limit_s = time_limit(timeout_s)
        job = this_job()
        self._ending = EndRequests(on_signal, is_timed=every_s is not None)
        self._saving = Saving(kept, self._program, limit_s)
        self._lasting: LastingRun | None = None
        if job is not None:
            self._lasting = LastingRun(job, self._program, self._saving, self._ending, replicas)

    @property
    def values(self) -> dict[str, Any]:
        """Plain values that are saved too, and are back after :meth:`resume`: an epoch, a best loss."""
        return self._program.values

    @values.setter
    def values(self, values: dict[str, Any]) -> None:
        self._program.values = values

    @property
    def handed(self) -> HandedOver | None:
        """How this worker got its state when it joined an elastic job."""
        return None if self._lasting is None else self._lasting.handed

    def resume(self) -> int:
        """Load the newest checkpoint of any worker into all of them; return its number of steps, or 0. Collective."""
        return self._saving.resume()

    def run(self, train: Callable[[int], object]) -> None:
        """Resume, and call ``train`` with the number of steps done; in an elastic job, again when workers change.

        ``train`` goes on from there to the end of the training and calls :meth:`step` after each step. Before it is
        called again, everything is as after the last complete step, and ranks are dealt anew; what depends on the rank
        or the number of workers belongs into it. No other exception calls it again.
        """
        if self._lasting is None:
            train(self.resume())
        else:
            self._lasting.run(train)

    def step(self, done: int) -> None:
        """Say that ``done`` steps are complete: saves if that is due, and ends the program if asked to. Collective."""
        self._saving.warn(self._program.find_half_steps())
        lasting = self._lasting if self._lasting is not None and self._lasting.is_running else None
        if lasting is not None:
            lasting.keep(done)
            if self._saving.team is None:
                count_alone(done)
        self._saving.refuse_others()
        due_s = self._every_s is not None and time.monotonic() - self._saving.saved_at >= self._every_s
        signals, is_late = self._ending.agree(self._saving.team, due_s)
        asked = max(signals, default=0)
        is_leaving = lasting is not None and set(signals) == {0, signal.SIGTERM}  # not all of them: the others go on
        if (asked and not is_leaving) or is_late or (self._every is not None and done % self._every == 0):
            self.save(done)
        if is_leaving and not signals[self._saving.rank]:
            raise WorkerLostError("a worker leaves: the epoch ends with this step")
        if lasting is not None and lasting.job.is_wanted and not asked:
            raise WorkerLostError("others join: the epoch ends with this step")
        if asked:
            if self._saving.writer is not None:
                self._saving.writer.finish()
            if not is_leaving:
                self._saving.wait_for_writer()
            self._ending.obey()
            if is_leaving and lasting is not None:
                lasting.job.resign()
            raise SystemExit(128 + asked)

    def save(self, done: int) -> None:
        """Save now, after ``done`` steps. Collective; returns as soon as the states are copied."""
        self._saving.save(done)

    def close(self) -> None:
        """Write what is left, and let signals be handled as before."""
        number = self._ending.close()
        self._saving.close()
        if number:
            # It came after the last step.
            signal.raise_signal(number)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_amount(name: str, value: float | None, least: float) -> None:
    if value is not None and not (isinstance(value, int | float) and least <= value < math.inf):
        raise ConfigError(f"checkpoint: {name}={value!r}, expected at least {least:g}")
