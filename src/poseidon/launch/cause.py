"""Which worker failed first, and why. Pure.

When one worker dies, the others fail too, because their connections break: their errors are symptoms. The cause is the
first death that is not a symptom; if there are only symptoms, the worker that they accuse.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from poseidon.errors import WorkerLostError

BLAMES_ANOTHER = WorkerLostError.exit_status

HUNG_STATUS = 124
"""Exit status of a job that was ended because it hung, as ``timeout`` uses it."""


class DeathKind(Enum):
    """How a worker was lost."""

    EXIT = "exit"
    HANG = "hang"
    MACHINE = "machine"


@dataclass(frozen=True)
class Death:
    """The loss of one worker, or of its whole machine."""

    rank: int
    host: str
    kind: DeathKind
    status: int = 0
    """Exit status, negative for a signal."""
    tail: tuple[str, ...] = ()
    """The last lines that it wrote to stderr, or to stdout if there were none."""
    note: str = ""

    @property
    def is_symptom(self) -> bool:
        """Whether the worker only reports that another one was lost."""
        if self.kind is not DeathKind.EXIT or self.status < 0:
            return False
        return self.status == BLAMES_ANOTHER or _SYMPTOMS.search("\n".join(self.tail[-20:])) is not None

    @property
    def exit_status(self) -> int:
        """The job's exit status if this is the cause, as a shell reports it."""
        if self.kind is DeathKind.HANG:
            return HUNG_STATUS
        if self.kind is DeathKind.MACHINE:
            return BLAMES_ANOTHER
        return 128 - self.status if self.status < 0 else self.status

    @property
    def how(self) -> str:
        """How it was lost, in words."""
        if self.kind is DeathKind.MACHINE:
            return f"its machine was lost: {self.note}"
        if self.kind is DeathKind.HANG:
            return f"it hangs: {self.note}"
        return describe_status(self.status)


_SYMPTOMS = re.compile(
    r"WorkerLostError"
    r"|Connection closed by peer|Connection reset by peer|Broken pipe|Connection was likely closed"
    r"|ncclRemoteError|remote process exited or there was a network error|ncclSystemError"
    r"|DistNetworkError|DistStoreError|failed to recv, got 0 bytes"
)
_EXCHANGES = re.compile(r"/torch/distributed/|/poseidon/(?:team|engine|routes|wire|sums|tables|job/world)")
_RANK_MARK = re.compile(r"^\[rank\d+\]: ?")
_ACCUSED = re.compile(
    r"(?:rank|worker) (\d+)(?: \([^)]*\))? "
    r"(is dead or cut off|never reported|sent a damaged message|is alive, at step \d+, [a-z]+(?: [a-z]+)*"
    r"(?:, waiting for (?:(?! \(waited |; rank |, but ).)+)?"
    r"|failed at step \d+, [a-z]+(?: [a-z]+)*: (?!WorkerLostError)(?:(?!\. The wait ended with).)+"
    r"|is lost after clock \d+|was given up by the others)"
)
_SUSPECTED = re.compile(r"rank (\d+) \([^)]*\) (is probably gone)")
"""Said where the store is gone; it also goes with a worker that another one's failure ended."""


def is_symptom_text(text: str) -> bool:
    """Return whether a line of an error only says that another worker, or the connection to it, was lost."""
    return _SYMPTOMS.search(text) is not None


def strip_rank(line: str) -> str:
    """Return a line without torch's mark of the rank."""
    return _RANK_MARK.sub("", line)


def describe_status(status: int) -> str:
    """Describe how a process ended."""
    if status >= 0:
        return f"it ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (if nobody did this by hand, the machine ran out of memory: see `dmesg`)" if status == -9 else ""
    return f"it was killed by {name}{hint}"


def first_cause(deaths: Sequence[Death]) -> Death | None:
    """Return the first death, in order of arrival, that is not a symptom; otherwise the first."""
    causes = [death for death in deaths if not death.is_symptom]
    return next(iter(causes or deaths), None)


def accused(deaths: Sequence[Death]) -> tuple[int, str] | None:
    """Return the worker that most others accuse, each only once, and of what; None if they accuse nobody."""
    for accusation in (_ACCUSED, _SUSPECTED):
        votes: dict[int, list[str]] = {}
        for death in deaths:
            # One that accuses the same worker in several lines knows no more than one that does so in its error alone.
            said: dict[int, str] = {}
            for rank, what in accusation.findall("\n".join(death.tail)):
                said.setdefault(int(rank), what)
            for accused_rank, what in said.items():
                votes.setdefault(accused_rank, []).append(what)
        if votes:
            first = max(votes, key=lambda rank: len(votes[rank]))
            return first, votes[first][0]
    return None


def resolve(deaths: Sequence[Death], running: Mapping[int, str], finished: Sequence[int]) -> Death | None:
    """Return the cause of a job's end; ``running`` maps the ranks that are alive to their hosts.

    If there are only symptoms, name the accused worker: it hangs if it still runs; if it reports another one itself,
    their connection broke, or that one is the last that runs, and hangs. Otherwise name one that finished early.
    """
    cause = first_cause(deaths)
    if cause is None or not cause.is_symptom:
        return cause
    found = _behind(accused(deaths), deaths, running)
    if found is not None and found[0] in running:
        rank, what = found
        return Death(
            rank, running[rank], DeathKind.HANG, note=f"the others gave up waiting for it and report: it {what}"
        )
    ended = {death.rank: death for death in deaths}
    if found is not None and found[0] in ended:
        return replace(ended[found[0]], note=f"the others report: it {found[1]}")
    if finished:
        early = ", ".join(map(str, finished))
        note = f"worker {early} had already ended with status 0: did it do fewer steps than the others?"
        return replace(cause, note=note)
    return cause


def _behind(
    found: tuple[int, str] | None, deaths: Sequence[Death], running: Mapping[int, str]
) -> tuple[int, str] | None:
    """Return whom the accused worker accuses itself, if all but that one have ended: the others missed who waited."""
    own = None if found is None else accused([death for death in deaths if death.rank == found[0]])
    # Of two whose connection broke, both end.
    return own if own is not None and set(running) == {own[0]} else found


def waits_for_others(lines: Sequence[str]) -> bool:
    """Return whether the stacks of an aborted Python show its main thread waiting for other workers."""
    stacks: list[list[str]] = []
    for line in lines:
        if line.startswith(("Thread 0x", "Current thread 0x")):
            stacks.append([])
        elif line.startswith("  File") and stacks:
            stacks[-1].append(line)
    # The innermost call comes first; only the main thread starts in a module.
    return any(
        _EXCHANGES.search("\n".join(stack)) is not None for stack in stacks if stack and stack[-1].endswith("<module>")
    )


def last_traceback(lines: Sequence[str], limit: int = 40) -> list[str]:
    """Return the last traceback in these lines (or the stacks of an aborted Python), else the last few lines."""
    # torch prefixes the lines of an error with the rank, which the report names already.
    lines = [_RANK_MARK.sub("", line) for line in lines if not line.startswith("Extension modules:")]
    starts = [
        number
        for number, line in enumerate(lines)
        if line.startswith(("Traceback (most recent call last)", "Fatal Python error", "  File"))
        and _begins(lines, number)
    ]
    if starts:
        found = list(lines[starts[-1] :])
        return found if len(found) <= limit else [*found[: limit // 2], "    ...", *found[-limit // 2 :]]
    return list(lines[-5:])


def _begins(lines: Sequence[str], number: int) -> bool:
    # A syntax error has no traceback: it starts with the position in the file.
    if not lines[number].startswith("  File"):
        return True
    above = lines[number - 1] if number else ""
    return not above.startswith(("  ", "Traceback", "Fatal", "Current thread", "Thread"))


def explain(cause: Death, others: Mapping[int, str]) -> str:
    """Return the report of a failed job: the cause, its last output, and the state of each other worker."""
    lines = [f"worker {cause.rank} on {cause.host} failed first: {cause.how}"]
    if cause.note and cause.kind is DeathKind.EXIT:
        lines.append(f"  {cause.note}")
    if cause.tail:
        lines += ["  its last words:", *(f"    {line}" for line in last_traceback(cause.tail))]
    if others:
        lines += ["  the others:", *(f"    worker {rank} {where}" for rank, where in sorted(others.items()))]
    return "\n".join(lines)
