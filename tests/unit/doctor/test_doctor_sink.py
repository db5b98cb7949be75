"""What a listener counts of a stream, by a clock of its own."""

from __future__ import annotations

import pytest

from poseidon.doctor import listening
from poseidon.doctor.listening import REPORT

SECONDS = 0.3
RATE = 1.25e6
"""Bytes a second."""


class Link:
    """A connection on which bytes arrive at given times; waiting for them is what moves the clock."""

    def __init__(self, arrivals: list[tuple[float, int]]) -> None:
        self.now = 0.0
        self.report: tuple[float, float, int] = (0.0, 0.0, 0)
        self._arrivals = arrivals
        self._limit_s = 0.0

    def settimeout(self, seconds: float) -> None:
        self._limit_s = seconds

    def recv_into(self, _: bytearray) -> int:
        if not self._arrivals:
            return 0
        at, size = self._arrivals[0]
        if at > self.now + self._limit_s:
            self.now += self._limit_s
            raise TimeoutError
        self._arrivals.pop(0)
        self.now = max(self.now, at)
        return size

    def sendall(self, data: bytes) -> None:
        self.report = REPORT.unpack(data)
        self._arrivals.clear()


def steady(begin: float) -> list[tuple[float, int]]:
    return [(begin + 0.01 * number, int(RATE * 0.01)) for number in range(1, 100)]


@pytest.mark.parametrize(
    "arrivals",
    [
        steady(0.0),
        # A burst that queues let pass at once, when the sender has begun late.
        [(0.28, 1000), *((0.281 + number / 1000, 25_000) for number in range(10)), *steady(0.29)],
        [(2.0, 1000), *((2.001 + number / 1000, 25_000) for number in range(10)), *steady(2.01)],
    ],
)
def test_a_stream_that_begins_late_is_not_taken_for_a_fast_one(
    arrivals: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(arrivals)
    monkeypatch.setattr(listening.time, "monotonic", lambda: link.now)
    listening._sink(link, SECONDS)  # type: ignore[arg-type]
    first, last, count = link.report
    assert count / (last - first) == pytest.approx(RATE, rel=0.1)
    assert last - first == pytest.approx(SECONDS * (1 - listening.WARM_UP), abs=0.021)


def test_silence_is_part_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link([*steady(0.0)[:15], (9.0, 1)])
    monkeypatch.setattr(listening.time, "monotonic", lambda: link.now)
    listening._sink(link, SECONDS)  # type: ignore[arg-type]
    first, last, count = link.report
    assert last == pytest.approx(0.01 + SECONDS)
    assert count / (last - first) < RATE / 2
