"""``--nproc MIN:MAX`` and ``--nodes MIN:MAX``; restarts that wait for hosts."""

from __future__ import annotations

import argparse

import pytest

from poseidon.errors import ConfigError
from poseidon.launch import run
from poseidon.launch.hosts import ClusterFile, Host
from poseidon.launch.launcher import Ending, JobSettings
from poseidon.launch.roster import Bounds

TWO = ClusterFile((Host("a"), Host("b", slots=3)))


def asked(nproc: str | None = None, nodes: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(nproc=nproc, nodes=nodes)


def test_bounds_are_found_where_they_are_written() -> None:
    assert run.find_bounds(asked(nproc="2:4"), TWO) == Bounds(2, 4)
    assert run.find_bounds(asked(nproc="4"), TWO) is None
    assert run.find_bounds(asked(nodes="1:8"), TWO) == Bounds(1, 8, counts_machines=True)
    assert run.find_bounds(asked(), TWO) is None


@pytest.mark.parametrize(
    ("nproc", "nodes", "words"),
    [
        ("4:2", None, "the second number is the most"),
        ("0:2", None, "at least 1 worker"),
        ("two", None, "expected a whole number, or MIN:MAX"),
        (None, "3:8", "2 machines are given"),
        (None, "1:1", "2 machines are given"),
        ("2", "1:2", "--nodes counts machines"),
    ],
)
def test_bounds_that_cannot_work_are_refused(nproc: str | None, nodes: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _ = run.parse_bounds(nproc, "--nproc") if nproc and not nodes else run.find_bounds(asked(nproc, nodes), TWO)


def test_the_most_workers_follow_from_machines_and_slots() -> None:
    settings = JobSettings(TWO.hosts, ("x.py",), "x.py", "/", bounds=Bounds(1, 4, counts_machines=True))
    assert settings.most_workers == 12


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(("restart", "wait_s", "is_reached"), [(1, 600.0, True), (0, 600.0, False), (1, 0.0, False)])
def test_a_restart_waits_for_hosts_and_a_start_does_not(
    monkeypatch: pytest.MonkeyPatch, restart: int, wait_s: float, is_reached: bool
) -> None:
    tried, pauses = [], []

    class Trying:
        def __init__(self, *_: object) -> None:
            tried.append(1)

        def run(self) -> Ending:
            if len(tried) < 4:
                raise ConfigError("b does not answer")
            return Ending(0)

    monkeypatch.setattr(run, "Launcher", Trying)
    monkeypatch.setattr(run.time, "sleep", pauses.append)
    output = Said()
    settings = JobSettings(TWO.hosts, ("x.py",), "x.py", "/")
    if is_reached:
        assert run._run_once(settings, output, None, restart, wait_s).status == 0  # type: ignore[arg-type]
        assert pauses == [2.0, 4.0, 8.0]
        assert "b does not answer\n  trying again in 2 s (--wait-for-hosts)" in output.lines
    else:
        with pytest.raises(ConfigError, match="b does not answer"):
            run._run_once(settings, output, None, restart, wait_s)  # type: ignore[arg-type]
        assert pauses == []
