from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable

import pytest

from poseidon.job import closing as room
from poseidon.job.closing import Closing, Stage, at_exit


def test_stages_close_in_order_and_the_last_of_a_stage_first() -> None:
    closing, closed = Closing(), []
    for name, stage in (("a", Stage.WATCHES), ("b", Stage.STEPS), ("c", Stage.EXCHANGES), ("d", Stage.EXCHANGES)):
        closing.register(stage, lambda name=name: closed.append(name))
    closing.close()
    assert closed == ["b", "d", "c", "a"]
    closing.close()
    assert closed == ["b", "d", "c", "a"]


def test_what_was_closed_by_hand_is_not_closed_again() -> None:
    closing, closed = Closing(), []
    cancel = closing.register(Stage.STEPS, lambda: closed.append("step"))
    cancel()
    cancel()
    closing.close()
    assert closed == []


def test_one_failure_keeps_nothing_else_open(caplog) -> None:
    closing, closed = Closing(), []
    closing.register(Stage.WATCHES, lambda: closed.append("watch"))

    def fail() -> None:
        raise RuntimeError("no answer")

    closing.register(Stage.STEPS, fail)
    with caplog.at_level(logging.ERROR):
        closing.close()
    assert closed == ["watch"]
    assert "no answer" in caplog.text


def test_closing_may_register_more() -> None:
    closing, closed = Closing(), []
    closing.register(Stage.STEPS, lambda: closing.register(Stage.EXCHANGES, lambda: closed.append("late")))
    closing.close()
    assert closed == ["late"]


class Handlers:
    """Stands for the interpreter's exit handlers, which run last in, first out."""

    def __init__(self) -> None:
        self.all: list[Callable[[], None]] = []
        self.register = self.all.append

    def unregister(self, handler: Callable[[], None]) -> None:
        self.all[:] = [each for each in self.all if each != handler]


def test_the_process_has_one_hook_which_runs_before_those_of_libraries_loaded_earlier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers, closing = Handlers(), Closing()
    monkeypatch.setattr(room, "atexit", handlers)
    monkeypatch.setattr(room, "_PROCESS", closing)
    at_exit(Stage.STEPS, lambda: None)
    handlers.register(print)
    at_exit(Stage.STEPS, lambda: None)
    assert handlers.all == [print, closing.close]


class Thing:
    def __init__(self, closing: Closing) -> None:
        self.cancel = closing.register(Stage.STEPS, self.close)

    def close(self) -> None:
        self.cancel()


@pytest.mark.parametrize("how", [lambda thing, _: thing.close(), lambda _, closing: closing.close()])
def test_what_is_closed_is_not_kept_alive(how: Callable[[Thing, Closing], None]) -> None:
    closing = Closing()
    thing = Thing(closing)
    is_there = weakref.ref(thing)
    how(thing, closing)
    del thing
    gc.collect()
    assert is_there() is None
