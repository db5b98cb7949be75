"""SIGINT and SIGHUP as requests to a solver, which it serves after the current iteration."""

from __future__ import annotations

import signal
from types import FrameType

from poseidon.caffe.solver.workers import Action
from poseidon.errors import unknown_name

EFFECTS = {"stop": Action.STOP, "snapshot": Action.SNAPSHOT, "none": Action.NONE}


class SignalActions:
    """A context manager that turns signals into actions; call it to take the pending action."""

    def __init__(self, sigint_effect: str = "stop", sighup_effect: str = "snapshot") -> None:
        self._effects = {
            signal.SIGINT: _effect("sigint_effect", sigint_effect),
            signal.SIGHUP: _effect("sighup_effect", sighup_effect),
        }
        self._received: set[int] = set()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> SignalActions:
        for number in self._effects:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def __call__(self) -> Action:
        """Return the action of the signals since the last call; stopping wins over a snapshot."""
        received, self._received = self._received, set()
        return max((effect for number, effect in self._effects.items() if number in received), default=Action.NONE)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received.add(number)


def _effect(flag: str, name: str) -> Action:
    if name not in EFFECTS:
        raise unknown_name(flag, name, list(EFFECTS))
    return EFFECTS[name]
