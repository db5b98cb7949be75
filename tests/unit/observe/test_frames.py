"""Other threads' stacks are read without a collection of garbage in between, where that would be dangerous."""

from __future__ import annotations

import gc
import threading

import pytest

from poseidon.observe import frames
from poseidon.observe.frames import calls_of


class Waiter:
    """A thread that waits inside a chain of calls."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self._is_there = threading.Event()
        self.thread = threading.Thread(target=self._outer, daemon=True)
        self.thread.start()
        self._is_there.wait()

    def _outer(self) -> None:
        self._inner()

    def _inner(self) -> None:
        self._is_there.set()
        self.go_on.wait()


@pytest.fixture
def waiter():
    one = Waiter()
    yield one
    one.go_on.set()
    one.thread.join()


@pytest.mark.parametrize("is_unsafe", [False, True])
def test_calls_are_read_from_the_innermost_on(monkeypatch: pytest.MonkeyPatch, waiter: Waiter, is_unsafe: bool) -> None:
    monkeypatch.setattr(frames, "IS_UNSAFE", is_unsafe)
    calls = calls_of(waiter.thread.ident or 0)
    ours = [call for call in calls if call.path == __file__]
    assert [call.name for call in ours] == ["_inner", "_outer"]
    again = {call.name: call.number for call in calls_of(waiter.thread.ident or 0)}
    assert all(again[call.name] == call.number for call in ours)
    assert calls_of(1) == []


@pytest.mark.parametrize("was_enabled", [False, True])
def test_no_garbage_is_collected_meanwhile(monkeypatch: pytest.MonkeyPatch, was_enabled: bool) -> None:
    seen: list[bool] = []

    def read(_thread: int) -> list[frames.FrameCall]:
        seen.append(gc.isenabled())
        return []

    monkeypatch.setattr(frames, "IS_UNSAFE", True)
    monkeypatch.setattr(frames, "_read", read)
    is_on = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        calls_of(1)
        after = gc.isenabled()
    finally:
        (gc.enable if is_on else gc.disable)()
    assert seen == [False]
    assert after == was_enabled
