"""Which worker of a job on one machine is named."""

from __future__ import annotations

from typing import Any

import pytest

from poseidon.launch import local


class Ending:
    """A process that ends at the given look at it."""

    def __init__(self, status: int, at: int) -> None:
        self._status, self._at, self._looks = status, at, 0

    def poll(self) -> int | None:
        self._looks += 1
        return self._status if self._looks >= self._at else None


def wait(*workers: Ending) -> int:
    processes: Any = workers
    return local._wait(processes)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_POLL_S", 0.0)


def test_the_first_to_fail_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert wait(Ending(0, 1), Ending(3, 2), Ending(4, 3)) == 3
    assert capsys.readouterr().err == "poseidon: worker 1 ended with status 3, the others were ended\n"


def test_a_worker_that_blames_another_is_not_taken_for_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert wait(Ending(75, 1), Ending(-11, 40)) == 139
    assert "worker 1 was killed by SIGSEGV" in capsys.readouterr().err


def test_if_all_blame_others_one_of_them_is_named() -> None:
    assert wait(Ending(75, 3), Ending(75, 1)) == 75


def test_one_that_is_blamed_and_does_not_end_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_CAUSE_S", 0.0)
    assert wait(Ending(75, 1), Ending(0, 1_000_000)) == 75
    assert "worker 0 ended with status 75, the others were ended" in capsys.readouterr().err


def test_all_is_well() -> None:
    assert wait(Ending(0, 1), Ending(0, 5)) == 0
