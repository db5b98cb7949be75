"""Tracebacks that are symptoms become one line; all others are shown in full."""

from __future__ import annotations

import io
from pathlib import Path

from poseidon.launch.folding import TracebackFolder
from poseidon.launch.output import JobOutput
from poseidon.launch.places import Place

SYMPTOM = [
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "train.py", line 3, in <module>',
    "[rank1]:     loss.backward()",
    "[rank1]: poseidon.errors.WorkerLostError: rank 1 gave up waiting for fc6",
]
CAUSE = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "ValueError: the reason of it all",
]


def fed(lines: list[str]) -> list[str]:
    folder = TracebackFolder()
    return [shown for line in lines for shown in folder.feed(line)] + folder.flush()


def test_a_symptom_becomes_a_line_and_a_cause_stays() -> None:
    folded = ["poseidon.errors.WorkerLostError: rank 1 gave up waiting for fc6 (3 more lines in its log)"]
    assert fed(SYMPTOM) == folded
    assert fed(CAUSE) == CAUSE
    assert fed(["warning", *SYMPTOM, "more"]) == ["warning", *folded, "more"]


def test_nothing_is_lost_of_a_traceback_without_an_end() -> None:
    assert fed(SYMPTOM[:2]) == SYMPTOM[:2]
    endless = [SYMPTOM[0], *["  File x"] * 1000]
    assert fed(endless) == endless


def test_the_log_has_what_the_terminal_folds(tmp_path: Path) -> None:
    places = [Place(rank, 0, rank, 2, "localhost") for rank in range(2)]
    out, err = io.StringIO(), io.StringIO()
    output = JobOutput(places, tmp_path, out, err)
    output.open_logs()
    for line in SYMPTOM:
        output.line(1, line, is_error=True)
    output.line(0, CAUSE[0], is_error=True)
    output.open_logs(1)
    output.close()
    assert err.getvalue().splitlines()[0].endswith("(3 more lines in its log)")
    assert CAUSE[0] in err.getvalue()
    log = (tmp_path / "worker-1.log").read_text().splitlines()
    assert log[: len(SYMPTOM)] == SYMPTOM
    assert log[-1].startswith("--- restart 1, ")
