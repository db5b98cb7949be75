"""The program that ``poseidon doctor`` starts on every host: one JSON line asks, one JSON line answers.

``python -m poseidon.doctor.probe`` greets with ``{"poseidon": VERSION}``, then answers until its input ends or is
silent for too long, so that it never outlives the doctor. Questions (``ask``): ``facts``, ``towards``, ``clock``,
``listen``, ``measure``. An answer is ``{"answer": ...}`` or ``{"error": TEXT}``.

``POSEIDON_PROBE_CLOCK_OFFSET`` (seconds) shifts the clock that this probe reports, to rehearse a wrong one.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from poseidon.doctor import machine, reaching
from poseidon.doctor.facts import OPEN, to_json
from poseidon.doctor.listening import ProbeListener
from poseidon.job.settings import PROBE_CLOCK_OFFSET
from poseidon.version import __version__

SILENCE_S = 180.0


class Probe:
    """Answers questions about this host and its links."""

    def __init__(self) -> None:
        self._listener: ProbeListener | None = None
        self._answers: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
            "facts": self._facts,
            "towards": self._towards,
            "clock": self._clock,
            "listen": self._listen,
            "measure": self._measure,
        }

    def answer(self, line: str | bytes) -> dict[str, Any]:
        """Return the answer to one line; an error is an answer too, so that no question ends the probe."""
        try:
            question = json.loads(line)
            return {"answer": self._answers[question["ask"]](question)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def _facts(self, question: Mapping[str, Any]) -> dict[str, Any]:
        # The variables of this host's workers; set before torch is imported, which reads some of them only then.
        os.environ.update(question["env"])
        return to_json(machine.read_facts(question["directory"], question["slots"]))

    def _towards(self, question: Mapping[str, Any]) -> list[str]:
        return [machine.source_address(peer) for peer in question["peers"]]

    def _clock(self, _: Mapping[str, Any]) -> float:
        return time.time() + PROBE_CLOCK_OFFSET.read()

    def _listen(self, question: Mapping[str, Any]) -> dict[str, Any]:
        self.close()
        self._listener = ProbeListener(question["address"], question["ports"], bytes.fromhex(question["token"]))
        return to_json(self._listener.listening)

    def _measure(self, question: Mapping[str, Any]) -> dict[str, Any]:
        target = reaching.Target(question["address"], bytes.fromhex(question["token"]), question["bulk_port"])
        found: dict[str, Any] = {"ports": reaching.try_ports(target, [*question["ports"], target.bulk_port])}
        if found["ports"][target.bulk_port] != OPEN:
            return found
        found["packets"] = reaching.try_packets(target, question["packets"])
        try:
            found["latency_s"] = reaching.measure_latency(target)
            found["one_stream_bits_per_s"] = reaching.measure_rate(target, 1, question["seconds"])
            found["many_stream_bits_per_s"] = reaching.measure_rate(target, question["streams"], question["seconds"])
        except OSError as error:
            found["stream_error"] = str(error) or type(error).__name__
        return found


def main() -> int:
    """Answer questions from stdin until there are no more."""
    # Libraries that print must not mix with our lines, so the real stdout is set aside.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"poseidon": __version__}), file=answers)
    # Unbuffered: select would not see a question that was read ahead.
    questions = os.fdopen(0, "rb", buffering=0, closefd=False)
    probe = Probe()
    try:
        while select.select([questions], [], [], SILENCE_S)[0]:
            line = questions.readline()
            if not line:
                return 0
            print(json.dumps(probe.answer(line)), file=answers)
        return 1
    except BrokenPipeError:
        return 1
    finally:
        probe.close()


if __name__ == "__main__":
    sys.exit(main())
