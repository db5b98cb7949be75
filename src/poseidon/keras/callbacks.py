"""Callbacks of a distributed ``fit``: who may write, who hears what, and that all stop together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from poseidon.keras.sharing import join_workers, same_logs, share, state_of
from poseidon.team.team import Team

_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


class BroadcastCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Takes weights and optimizer state from worker 0 when training begins.

    ``distribute`` does so by itself; this one is for a loop of your own that loads a checkpoint on worker 0 alone.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras' own signature
        """Take the state over. Collective."""
        if join_workers() > 1:
            team = Team(None, self._timeout_s)
            share(team, state_of(self.model), "the initial state")
            team.close()


class _First(keras.callbacks.Callback):  # type: ignore[misc]
    """Comes before all others: they see worker 0's logs, and so decide alike."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self._team = team

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras' own signature
        if logs:
            logs.update(same_logs(self._team, logs))


class _Last(keras.callbacks.Callback):  # type: ignore[misc]
    """Comes after all others: takes over what they restored on worker 0, and stops if any wants to stop."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self._team = team

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras' own signature
        share(self._team, state_of(self.model), "the restored state")
        # Where a backup was restored, Keras goes on from there.
        epoch = self._team.gather_ints([getattr(self.model, "_initial_epoch", None) or 0], "the first epoch")[0][0]
        self.model._initial_epoch = epoch or None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras' own signature
        rows = self._team.gather_ints([int(bool(self.model.stop_training))], "whether to stop")
        self.model.stop_training = any(row[0] for row in rows)


def with_ours(callbacks: Any, team: Team) -> list[Any]:
    """Return a worker's callbacks with ours around them; those that write files stay on worker 0 alone."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    elif not isinstance(callbacks, Sequence):
        callbacks = [] if callbacks is None else [callbacks]
    kept = [callback for callback in callbacks if team.rank == 0 or not isinstance(callback, _WRITERS)]
    return [_First(team), *kept, _Last(team)]
