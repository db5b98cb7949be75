"""When to start lost workers again and to try lost machines, with back-off. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_S = 0.5
LONGEST_S = 30.0
LASTS_S = 60.0
"""A worker that lasted so long has come back: the next time counts as the first."""


@dataclass(frozen=True)
class Opening:
    """A place where somebody is missing: a machine, or one worker of a machine that is there."""

    machine: int
    local_rank: int | None = None
    """None: the whole machine."""


@dataclass
class _Trial:
    tries: int = 0
    tried_at: float = 0.0
    due_at: float | None = None
    """None: nobody is missing, or it is being tried."""


@dataclass
class Vacancies:
    """Who is missing, and when to try again; at most ``limit`` trials in all that begin with a loss."""

    limit: int
    _left: int = field(init=False)
    _trials: dict[Opening, _Trial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._left = self.limit

    def lose(self, opening: Opening, now: float) -> None:
        """Note that somebody is lost who was there."""
        if self._left > 0:
            self._left -= 1
            self.retry(opening, now)

    def retry(self, opening: Opening, now: float) -> None:
        """Try again later: somebody is lost, or did not come."""
        trial = self._trials.setdefault(opening, _Trial())
        if trial.tries and now - trial.tried_at > LASTS_S:
            trial.tries = 0
        trial.due_at = now + min(LONGEST_S, FIRST_S * 2**trial.tries)
        trial.tries += 1

    def take_due(self, now: float) -> list[Opening]:
        """Return whom to try now; each is returned once until it is lost or to be tried again."""
        due = [each for each, trial in self._trials.items() if trial.due_at is not None and trial.due_at <= now]
        for each in due:
            self._trials[each].due_at, self._trials[each].tried_at = None, now
        return due

    @property
    def is_open(self) -> bool:
        """Whether somebody will be tried."""
        return any(trial.due_at is not None for trial in self._trials.values())
