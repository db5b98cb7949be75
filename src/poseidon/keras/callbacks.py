"""Callbacks of a distributed ``fit``: worker 0 alone writes, all see the same logs, and all stop together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from poseidon.job.tell import tell
from poseidon.job.world import join_workers
from poseidon.keras.sharing import same_logs, share, state_of
from poseidon.team.team import Team

_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


class BroadcastCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Copies weights and optimizer state from worker 0 when training begins.

    ``distribute`` does this itself; the callback is for your own loop that loads a checkpoint on worker 0 alone.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras' own signature
        """Copy the state from worker 0. Collective."""
        if join_workers() > 1:
            team = Team(None, self._timeout_s)
            share(team, state_of(self.model), "the initial state")
            team.close()


class _First(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs before all others: they see worker 0's logs, and so make the same decisions."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self._team = team

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras' own signature
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        if steps and epochs and self._team.rank == 0:
            tell(steps_left=steps * (epochs - epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras' own signature
        if logs:
            logs.update(same_logs(self._team, logs))


class _Last(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs after all others: copies what they restored on worker 0, and stops if any worker wants to stop."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self._team = team

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras' own signature
        share(self._team, state_of(self.model), "the restored state")
        # After restoring a backup Keras continues from there.
        epoch = self._team.gather_ints([getattr(self.model, "_initial_epoch", None) or 0], "the first epoch")[0][0]
        self.model._initial_epoch = epoch or None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras' own signature
        rows = self._team.gather_ints([int(bool(self.model.stop_training))], "whether to stop")
        self.model.stop_training = any(row[0] for row in rows)


def with_ours(callbacks: Any, team: Team) -> list[Any]:
    """Return a worker's callbacks with ours around them; only worker 0 keeps those that write files."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    elif not isinstance(callbacks, Sequence):
        callbacks = [] if callbacks is None else [callbacks]
    kept = [callback for callback in callbacks if team.rank == 0 or not isinstance(callback, _WRITERS)]
    return [_First(team), *kept, _Last(team)]
