"""Keras scripts under ``--auto``: every model that a script trains is distributed as by ``poseidon.keras``.

Worker 0 writes models and weights. When a script loads one later, worker 0's file is sent to the others, who have none.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import poseidon.keras
from poseidon.engine.outside import take_from_first
from poseidon.following.keras_rates import scale_rate
from poseidon.following.options import AutoOptions
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team

_TRAINING = ("fit", "train_on_batch")
_USING = ("evaluate", "predict")
_WRITING = ("save", "save_weights", "export")


class KerasModels:
    """Distributes each model when it is first trained."""

    def __init__(
        self,
        team: Team,
        options: AutoOptions,
        report: ScriptReport,
        aside: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._team = team
        self._options = options
        self._report = report
        self._aside = aside
        """A context without other averaging: on the torch backend Keras calls ``backward()`` itself."""
        self._distributed: dict[int, tuple[Any, Any]] = {}
        """Models by their identity, each with what distributes it."""

    @property
    def has_trained(self) -> bool:
        """Whether the workers have taken any step together."""
        return bool(self._distributed)

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        for name in _TRAINING:
            patches.wrap(_owner(name), name, self._training(name))
        for name in _USING:
            patches.wrap(_owner(name), name, self._use)
        for name in _WRITING:
            patches.wrap(_owner(name), name, self._write)
        patches.wrap(_owner("load_weights"), "load_weights", self._load_weights)
        load_model = keras.models.load_model
        for module in (keras.models, keras.saving):
            patches.wrap(module, "load_model", lambda _, *args, **kwargs: self._load_model(load_model, *args, **kwargs))
        patches.on_undo(self._close)

    def conclude(self) -> None:
        """Check at the end that the workers hold the same. Collective."""
        for _, distribution in self._distributed.values():
            distribution.share_averages()
            distribution.verify_replicas()

    def _training(self, name: str) -> Callable[..., Any]:
        def train(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
            if id(model) in self._distributed:
                with self._aside():
                    return original(model, *args, **kwargs)
            self._distribute(model)
            return getattr(model, name)(*args, **kwargs)

        return train

    def _use(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if id(model) in self._distributed:
            self._distributed[id(model)][1].share_averages()
        return original(model, *args, **kwargs)

    def _distribute(self, model: Any) -> None:
        made = poseidon.keras.distribute(model, batch=self._options.batch, timeout_s=self._options.timeout_s)
        # Keep the model itself, so that no other one can get its id.
        self._distributed[id(model)] = (model, made)
        if self._options.scale_lr:
            scale_rate(model.optimizer, self._team.size, self._report)
        batch = "a batch for each worker" if self._options.batch == "per-worker" else "each batch divided"
        self._report.say(
            f"{model.name}: taken from worker 0; fit's data are dealt out, {batch}; gradients are averaged in every "
            "step; evaluation is whole on every worker"
        )

    def _write(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._team.rank == 0 or self._options.files == "shared":
            return original(model, *args, **kwargs)
        return None

    def _load_weights(self, original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        with self._file_of_first(filepath) as path:
            return original(model, path, *args, **kwargs)

    def _load_model(self, original: Callable[..., Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
        with self._file_of_first(filepath) as path:
            return original(path, *args, **kwargs)

    @contextlib.contextmanager
    def _file_of_first(self, path: Any) -> Iterator[Any]:
        """Send worker 0's file to the others; anything but a single file is left to each worker. Collective."""
        source = Path(path)
        size = source.stat().st_size if self._team.rank == 0 and source.is_file() else -1
        size = self._team.gather_ints([size], "the file to load")[0][0]
        if size < 0 or self._options.files == "shared":
            yield path
            return
        mine = np.fromfile(source, np.uint8) if self._team.rank == 0 else np.empty(size, np.uint8)
        (content,) = take_from_first(self._team, [mine], "the file to load")
        if self._team.rank == 0:
            yield path
            return
        with tempfile.TemporaryDirectory(prefix="poseidon-keras-") as folder:
            copy = Path(folder) / source.name
            content.tofile(copy)
            yield str(copy)

    def _close(self) -> None:
        for _, distribution in self._distributed.values():
            distribution.close()
        self._distributed.clear()


def _owner(name: str) -> Any:
    """Return the class that defines a method of ``keras.Model``: trainers differ between backends."""
    return next(kind for kind in keras.Model.__mro__ if name in vars(kind))
