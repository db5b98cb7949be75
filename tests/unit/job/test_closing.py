from __future__ import annotations

import logging

from poseidon.job.closing import Closing, Stage


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
