"""Experiment trackers: what they get, and that a broken one stops nothing."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from made_runs import make_state
from poseidon.errors import ConfigError
from poseidon.observe import trackers
from poseidon.observe.trackers import EVERY_S, Tracker, TrackerFeed, make_tracker, tracked_values


class FakeWandb(types.ModuleType):
    """The part of wandb's documented interface that is used."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        self.calls: list[tuple[str, Any]] = []
        self.summary: dict[str, Any] = {}

    def init(self, project: str, name: str) -> FakeWandb:
        self.calls.append(("init", (project, name)))
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append(("define_metric", (name, step_metric)))

    def log(self, data: dict[str, float]) -> None:
        self.calls.append(("log", data))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


class FakeMlflow(types.ModuleType):
    """The part of MLflow's documented interface that is used."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        self.calls: list[tuple[str, Any]] = []

    def set_experiment(self, experiment_name: str) -> None:
        self.calls.append(("set_experiment", experiment_name))

    def start_run(self, run_name: str) -> None:
        self.calls.append(("start_run", run_name))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("log_metrics", (metrics, step)))

    def set_tag(self, key: str, value: str) -> None:
        self.calls.append(("set_tag", (key, value)))

    def end_run(self, status: str) -> None:
        self.calls.append(("end_run", status))


def follow(tracker: Tracker, status: int = 0) -> TrackerFeed:
    """Feed a tracker with two states and end it."""
    feed = TrackerFeed(tracker)
    state = make_state(2)
    feed.feed(state, 100.0)
    feed.feed({**state, "loss": 7.0}, 101.0)  # too soon
    feed.feed({**state, "loss": 0.25}, 101.0 + EVERY_S)
    feed.close(status, "limited by the wire")
    return feed


def test_values_are_plain_numbers_of_the_job_and_its_workers() -> None:
    values = tracked_values({**make_state(3), "loss": "nan"})
    assert values["poseidon/steps_per_s"] == 9.5
    assert values["poseidon/worker_2/wait_ms"] == pytest.approx(21.0)
    assert values["poseidon/route_sharded/step_bytes"] == 5e6
    assert "poseidon/loss" not in values
    assert not [name for name in tracked_values(make_state(40)) if "worker_" in name]
    assert tracked_values({}) == {}


def test_wandb_gets_values_by_step_and_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert follow(make_tracker("wandb=digits", "train.py", tmp_path / "train-1"), 3).trouble() is None
    kinds = [kind for kind, _ in wandb.calls]
    assert kinds == ["init", "define_metric", "log", "log", "finish"]
    assert wandb.calls[0][1] == ("digits", "train-1")
    assert [data["poseidon/loss"] for kind, data in wandb.calls if kind == "log"] == [0.41, 0.25]
    assert wandb.calls[2][1]["poseidon/step"] == 570
    assert wandb.calls[-1] == ("finish", 3)
    assert wandb.summary == {"poseidon/verdict": "limited by the wire"}


def test_mlflow_gets_metrics_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    assert follow(make_tracker("mlflow", "examples/train.py", None)).trouble() is None
    assert mlflow.calls[:2] == [("set_experiment", "train"), ("start_run", "train")]
    metrics, step = mlflow.calls[2][1]
    assert (metrics["poseidon/samples_per_s"], step) == (1216.0, 570)
    assert mlflow.calls[-2:] == [("set_tag", ("poseidon.verdict", "limited by the wire")), ("end_run", "FINISHED")]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert follow(make_tracker("tensorboard", "train.py", tmp_path / "run")).trouble() is None
    found = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [(one.step, round(one.value, 2)) for one in found.Scalars("poseidon/loss")] == [(570, 0.41), (570, 0.25)]


class _Broken(Tracker):
    package = "somewhere"

    def open(self) -> None:
        raise SystemExit("no server answers")

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self, status: int, verdict: str) -> None: ...


def test_a_tracker_that_fails_is_said_once_and_stops_nothing() -> None:
    feed = follow(_Broken("", ""))
    assert feed.trouble() == (
        "warning: nothing more is logged to somewhere (SystemExit: no server answers); the job goes on"
    )
    assert feed.trouble() is None
    feed.feed(make_state(1), 1000.0)


def test_a_tracker_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "CLOSE_S", 0.01)
    may_end, has_ended = threading.Event(), threading.Event()

    class Slow(_Broken):
        def open(self) -> None:
            may_end.wait(60)
            has_ended.set()

    feed = TrackerFeed(Slow("", ""))
    for number in range(100):
        feed.feed(make_state(1), number * EVERY_S)
    feed.close(0, "")
    assert not has_ended.is_set()
    may_end.set()


def test_a_job_that_never_trains_leaves_no_run() -> None:
    feed = TrackerFeed(_Broken("", ""))
    feed.feed({"workers": [{"step": 0}]}, 100.0)
    feed.close(1, "")
    assert feed.trouble() is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensorbord=x", "did you mean 'tensorboard'"),
        ("wandb", "pip install wandb"),
        ("mlflow=x", "pip install mlflow"),
    ],
)
def test_what_is_missing_is_named(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=message):
        make_tracker(text, "train.py", None)
