"""Files that TensorFlow writes itself: worker 0 writes and reads them, the others follow.

TensorFlow opens files in C++, out of reach of Python's redirection (``auto/files.py``), and there may be no private
view. So the others save nothing, write summaries and other files to a scratch folder, and copy what worker 0 restores
and finds.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint, checkpoint_management
from tensorflow.python.lib.io import file_io
from tensorflow.python.ops import summary_ops_v2
from tensorflow.python.saved_model import save as saved_model
from tensorflow.python.summary.writer import writer
from tensorflow.python.training import saver

from poseidon.engine.outside import take_from_first
from poseidon.errors import ConfigError
from poseidon.following.nesting import Nesting
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.tensorflow.replacing import replace_everywhere
from poseidon.tensorflow.sessions import Sessions

_CHANGING = (
    "create_dir",
    "create_dir_v2",
    "recursive_create_dir",
    "recursive_create_dir_v2",
    "delete_file",
    "delete_file_v2",
    "delete_recursively",
    "delete_recursively_v2",
    "rename",
    "rename_v2",
    "copy",
    "copy_v2",
)
"""Functions of TensorFlow's file system that change files."""


class Files:
    """Stops all workers but worker 0 from writing, and makes all of them find what worker 0 finds."""

    def __init__(self, team: Team, sessions: Sessions, report: ScriptReport) -> None:
        self._team = team
        self._sessions = sessions
        self._report = report
        self._scratch: Path | None = None
        self._nesting = Nesting()
        """Whether worker 0 is inside a call: the others do not make the calls that TensorFlow nests in it."""

    def install(self, patches: Patches) -> None:
        """Install the replacements."""
        patches.wrap(saver.Saver, "save", self._save)
        patches.wrap(saver.Saver, "restore", self._restore)
        for name in ("latest_checkpoint", "checkpoint_exists", "checkpoint_exists_internal"):
            replace_everywhere(patches, getattr(checkpoint_management, name), self._ask_first)
        replace_everywhere(patches, checkpoint_management.get_checkpoint_state, self._ask_first_for_state)
        patches.wrap(checkpoint.TrackableSaver, "save", self._save_objects)
        patches.wrap(checkpoint.TrackableSaver, "restore", self._restore_objects)
        if self._team.rank == 0:
            return
        replace_everywhere(patches, saved_model.save, _do_nothing)
        for make in (summary_ops_v2.create_file_writer, summary_ops_v2.create_file_writer_v2):
            replace_everywhere(patches, make, self._make_summaries)
        patches.on_undo(self._clean_up)
        patches.wrap(writer.FileWriter, "__init__", self._make_writer)
        patches.wrap(file_io.FileIO, "__init__", self._open)
        for name in _CHANGING:
            replace_everywhere(patches, getattr(file_io, name), _do_nothing)

    # Savers.

    def _save(self, original: Callable[..., Any], one: Any, session: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        self._report.say("checkpoints are written by worker 0")
        if self._team.rank == 0:
            return self._alone(original, one, session, path, *args, **kwargs)
        step = args[0] if args else kwargs.get("global_step")
        if step is None:
            return path
        is_in_graph = isinstance(step, (tf.Tensor, tf.Variable))
        return f"{path}-{tf.compat.v1.train.global_step(session, step) if is_in_graph else int(step)}"

    def _restore(self, original: Callable[..., Any], one: Any, session: Any, path: str) -> None:
        """Restore on worker 0 and copy its values; if that fails, it fails on all workers."""
        error: Exception | None = None
        self._sessions.prepare(session.graph)
        if self._team.rank == 0:
            try:
                self._alone(original, one, session, path)
            except Exception as failure:
                error = failure
        (said, *_) = self._team.gather_json("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if said:
            raise ConfigError(f"worker 0 cannot restore {path}: {said}")
        self._sessions.take_over(session, _variables_of(one))

    # tf.train.Checkpoint and its manager.

    def _save_objects(self, original: Callable[..., Any], one: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        self._report.say("checkpoints are written by worker 0")
        if self._team.rank == 0:
            return self._alone(original, one, file_prefix, *args, **kwargs)
        return file_prefix

    def _restore_objects(self, original: Callable[..., Any], one: Any, save_path: Any, *args: Any, **kw: Any) -> Any:
        """Restore from worker 0's files, which are sent to the others: variables may be made and restored later."""
        if save_path is None or self._nesting.is_inside or not tf.executing_eagerly():
            return original(one, save_path, *args, **kw)
        path = self._fetch(os.fspath(save_path))
        with self._nesting.enter():
            return original(one, path, *args, **kw)

    def _fetch(self, prefix: str) -> str:
        """Return where this worker finds a checkpoint of worker 0's. Collective."""
        found = sorted(Path(prefix).parent.glob(f"{Path(prefix).name}.*")) if self._team.rank == 0 else []
        files = self._team.gather_json([[path.name, path.stat().st_size] for path in found])[0]
        if self._team.rank == 0:
            take_from_first(self._team, [np.fromfile(path, np.uint8) for path in found], "a checkpoint")
            return prefix
        contents = take_from_first(self._team, [np.empty(size, np.uint8) for _, size in files], "a checkpoint")
        place = self._elsewhere(prefix)
        place.parent.mkdir(parents=True, exist_ok=True)
        for (name, _), content in zip(files, contents, strict=True):
            content.tofile(place.parent / name)
        return str(place)

    def _ask_first(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._nesting.is_inside:
            return original(*args, **kwargs)
        mine = self._alone(original, *args, **kwargs) if self._team.rank == 0 else None
        return self._team.gather_json(mine)[0]

    def _ask_first_for_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._nesting.is_inside:
            return original(*args, **kwargs)
        mine = self._alone(original, *args, **kwargs) if self._team.rank == 0 else None
        text = self._team.gather_json(None if mine is None else mine.SerializeToString().hex())[0]
        if self._team.rank == 0 or text is None:
            return mine
        return checkpoint_management.CheckpointState.FromString(bytes.fromhex(text))

    def _alone(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._nesting.enter(), self._sessions.ours():
            return original(*args, **kwargs)

    # Other files.

    def _make_writer(self, original: Callable[..., Any], one: Any, logdir: str, *args: Any, **kwargs: Any) -> None:
        place = self._elsewhere(logdir)
        place.mkdir(parents=True, exist_ok=True)
        original(one, str(place), *args, **kwargs)

    def _make_summaries(self, original: Callable[..., Any], logdir: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(logdir, str | os.PathLike):
            place = self._elsewhere(logdir)
            place.mkdir(parents=True, exist_ok=True)
            logdir = str(place)
        return original(logdir, *args, **kwargs)

    def _open(self, original: Callable[..., Any], one: Any, name: Any, mode: str = "r", *args: Any, **kw: Any) -> None:
        if set(mode) & set("wa+"):
            place = self._elsewhere(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            name = str(place)
        original(one, name, mode, *args, **kw)

    def _elsewhere(self, path: Any) -> Path:
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix=f"poseidon-tensorflow-{self._team.rank}-"))
        return self._scratch / str(Path(os.fspath(path)).absolute()).lstrip("/")

    def _clean_up(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


def _do_nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Leave changes of folders to worker 0."""


def _variables_of(one: Any) -> list[Any]:
    return [found for found in tf.nest.flatten(one._var_list) if isinstance(found, tf.Variable)]
