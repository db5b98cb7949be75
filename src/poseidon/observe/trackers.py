"""Speed, loss and waits of a job for the experiment trackers that people have: TensorBoard, Weights & Biases, MLflow.

The launcher feeds them, on a thread of their own: a server that is slow or gone delays no job. They are optional
packages, imported only when asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import queue
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon.errors import ConfigError, unknown_name

EVERY_S = 5.0
"""Seconds between two sets of values."""
CLOSE_S = 20.0
"""How long a tracker may take at the end to send what it has."""
_MOST_WAITING = 20
"""Sets of values that wait for a slow tracker; later ones are dropped."""
_MOST_WORKERS = 16
"""Workers of which each has values of its own; of larger jobs there are only medians."""


class Tracker(ABC):
    """Where values go. All calls come on one thread, :meth:`open` first; any of them may raise."""

    package = ""
    """What to install for it."""

    def __init__(self, target: str, name: str) -> None:
        self.target = target
        self.name = name
        """Of the run."""

    @abstractmethod
    def open(self) -> None:
        """Begin a run."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add values at a step; after a restart, steps come again."""

    @abstractmethod
    def close(self, status: int, verdict: str) -> None:
        """End the run; ``status`` is the job's."""


class TensorBoard(Tracker):
    """Event files in the folder ``target``, written by TensorBoard's own package; torch is not needed."""

    package = "tensorboard"

    def open(self) -> None:
        """Begin an event file."""
        writing = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = writing.EventFileWriter(self.target)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add scalars."""
        rows = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=rows)))

    def close(self, status: int, verdict: str) -> None:  # noqa: ARG002 - event files have no place for them
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run in the project ``target``; server and login as wandb is configured."""

    package = "wandb"

    def open(self) -> None:
        """Begin a run."""
        self._run = importlib.import_module("wandb").init(project=self.target, name=self.name)
        # W&B's own step may only grow; after a restart ours begins again.
        self._run.define_metric("poseidon/*", step_metric="poseidon/step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add values."""
        self._run.log({**values, "poseidon/step": step})

    def close(self, status: int, verdict: str) -> None:
        """End the run."""
        self._run.summary["poseidon/verdict"] = verdict
        self._run.finish(exit_code=status)


class Mlflow(Tracker):
    """A run in the experiment ``target``; its server is that of ``MLFLOW_TRACKING_URI``."""

    package = "mlflow"

    def open(self) -> None:
        """Begin a run."""
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(self.target)
        self._mlflow.start_run(run_name=self.name)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add metrics."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self, status: int, verdict: str) -> None:
        """End the run."""
        self._mlflow.set_tag("poseidon.verdict", verdict)
        self._mlflow.end_run(status="FAILED" if status else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": Mlflow}


def make_tracker(text: str, script: str, log_dir: Path | None) -> Tracker:
    """Return the tracker of ``--log-to KIND[=TARGET]``; raise :class:`ConfigError` if it is not known or installed."""
    kind, _, target = text.partition("=")
    if kind not in TRACKERS:
        raise unknown_name("tracker of --log-to", kind, list(TRACKERS))
    package = TRACKERS[kind].package
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"--log-to {kind} needs the package {package}: pip install {package}")
    if not target and kind == "tensorboard":
        if log_dir is None:
            raise ConfigError(
                "--log-to tensorboard writes into the run's folder, and --log-dir none leaves none; "
                "name a folder: --log-to tensorboard=DIR"
            )
        target = str(log_dir)
    stem = Path(script).stem
    return TRACKERS[kind](target or stem, stem if log_dir is None else log_dir.name)


def tracked_values(state: Mapping[str, Any]) -> dict[str, float]:
    """Return what a run's state has for a tracker, by name. Pure."""
    workers = state.get("workers") or []
    found: dict[str, Any] = {name: state.get(name) for name in ("steps_per_s", "samples_per_s", "loss", "left_s")}
    parts = {"forward_ms": "forward_s", "backward_ms": "backward_s", "between_ms": "between_s", "wait_ms": "wait_s"}
    for name, key in parts.items():
        found[name] = statistics.median(1e3 * one[key] for one in workers) if workers else None
        if len(workers) <= _MOST_WORKERS:
            found |= {f"worker_{one['rank']}/{name}": 1e3 * one[key] for one in workers}
    found["memory_bytes"] = max((one["memory_bytes"] for one in workers), default=None)
    found["queued_bytes"] = max((one["queued_bytes"] for one in workers), default=None)
    found |= {f"route_{one['route']}/step_bytes": one["step_bytes"] for one in state.get("routes") or []}
    return {
        f"poseidon/{name}": float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


@dataclass(frozen=True)
class _End:
    status: int
    verdict: str


class TrackerFeed:
    """Hands values to a tracker on a thread of its own; neither a slow tracker nor a broken one stops the caller."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._waiting: queue.Queue[tuple[dict[str, float], int] | _End] = queue.Queue(_MOST_WAITING)
        self._fed_at = -math.inf
        self._trouble: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="poseidon-tracker", daemon=True)
        self._thread.start()

    def feed(self, state: Mapping[str, Any], now: float, is_last: bool = False) -> None:
        """Take a run's state, if it is time."""
        steps = [one["step"] for one in state.get("workers") or []]
        if self._is_broken or not any(steps) or (now - self._fed_at < EVERY_S and not is_last):
            return
        self._fed_at = now
        if not self._waiting.full() or is_last:
            self._put((tracked_values(state), max(steps)))

    def trouble(self) -> str | None:
        """Return, once, why nothing more is logged."""
        return None if self._trouble.empty() else self._trouble.get()

    def close(self, status: int, verdict: str) -> None:
        """Let the tracker send what it has, for a while."""
        self._put(_End(status, verdict))
        self._thread.join(CLOSE_S)

    def _put(self, what: tuple[dict[str, float], int] | _End) -> None:
        while not self._is_broken:
            try:
                self._waiting.put_nowait(what)
                return
            except queue.Full:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        try:
            self._waiting.get_nowait()
        except queue.Empty:
            return

    def _run(self) -> None:
        try:
            is_open = False
            while not isinstance(what := self._waiting.get(), _End):
                if not is_open:  # a job that never trains leaves no run
                    self._tracker.open()
                    is_open = True
                self._tracker.log(*what)
            if is_open:
                self._tracker.close(what.status, what.verdict)
        # Whatever such a package raises, its own exits included: the job goes on.
        except BaseException as error:
            self._is_broken = True
            why = str(error).strip().splitlines()[:1]
            what_ = f"{type(error).__name__}: {why[0]}" if why else type(error).__name__
            self._trouble.put(f"warning: nothing more is logged to {self._tracker.package} ({what_}); the job goes on")
