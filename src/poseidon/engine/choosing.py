"""Chooses among whole plans: the simulator ranks them, the best are tried in training itself, the fastest stays.

Every plan is exact, so trying one only changes how long some steps take. Rank 0 decides what to try, from times that
all workers share, and tells the others; which step belongs to which plan follows from the steps alone
(``trial.py``). Methods are collective where they say so.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import socket
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from poseidon.engine.choices import Choices, cache_folder
from poseidon.engine.stopwatch import Laps
from poseidon.engine.trial import Trial, Turn
from poseidon.job import settings
from poseidon.planning.candidates import Candidate, shortlist
from poseidon.planning.planner import Plan, Tried
from poseidon.planning.profile import Profile
from poseidon.planning.route import Routes
from poseidon.planning.transfers import SentBits
from poseidon.sim.ranking import Equipment, predict_s
from poseidon.team.team import Team

TRIAL_S = 0.4
"""About how long the marked steps of one plan take together..."""
FEWEST_LAPS, MOST_LAPS = 5, 60
"""... within these numbers of steps."""


class Choosing:
    """Which plan a model uses. Its first plan is set by :meth:`begin`."""

    def __init__(self, team: Team, equipment: Equipment, laps: Laps, choices: Choices | None) -> None:
        self.plan: Plan | None = None
        """The plan in force."""
        self.has_losers = False
        """Plans were tried and dropped since :attr:`plan` changed last."""
        self._team = team
        self._equipment = equipment
        self._laps = laps
        self._choices = choices
        """None: nothing is tried."""
        self._candidates: tuple[Candidate, ...] = ()
        self._predicted_s: list[float] = []
        self._trial: Trial | None = None
        self._is_ranked = False

    @property
    def tries(self) -> bool:
        """Whether more plans than one are of any use."""
        return self._choices is not None

    @property
    def needs_times(self) -> bool:
        """Whether :meth:`rank` waits for the times of a backward of the first plan."""
        return self.tries and not self._is_ranked and len(self._candidates) > 1

    @property
    def is_open(self) -> bool:
        """Whether the plan may still change without a change of the batch."""
        return self.plan is None or self.needs_times or (self._trial is not None and not self._trial.is_over)

    @property
    def changes_next(self) -> bool:
        """Whether the plan changes with the next regular backward, which must land before a forward begins."""
        return self._trial is not None and not self._trial.is_over and self._trial.is_last_backward

    def begin(self, candidates: Sequence[Candidate], key: str) -> Candidate:
        """Start with a new list of plans; return the one to use: the first, or what an earlier run kept. Collective."""
        self._candidates = tuple(candidates)
        self._trial, self._is_ranked, self.has_losers = None, False, False
        chosen = candidates[0]
        self.plan = chosen.plan
        if self.needs_times:
            assert self._choices is not None
            self._choices.key = key
            found = self._hear(self._choices.read() if self._team.rank == 0 else None)
            named = [one for one in candidates if found is not None and one.name == found["name"]]
            if named:
                (chosen,) = named
                tried = tuple(Tried(**one) for one in found["tried"])
                self.plan = dataclasses.replace(chosen.plan, tried=tried, is_remembered=True)
                self._is_ranked = True
        return chosen

    def rank(self, profile: Profile, sent_bits: SentBits) -> None:
        """Predict each plan's step, given times and bits of the first, and decide what to try. Collective."""
        answer = None
        if self._team.rank == 0:
            predicted_s = [predict_s(one, profile, self._equipment, sent_bits) for one in self._candidates]
            order = shortlist(self._candidates, predicted_s)
            laps = math.ceil(TRIAL_S / max(min(predicted_s), 1e-6))
            answer = {"predicted_s": predicted_s, "order": order, "laps": min(max(laps, FEWEST_LAPS), MOST_LAPS)}
        heard = self._hear(answer)
        self._predicted_s = heard["predicted_s"]
        # The plan in use is first: it has run some steps already.
        order = sorted(heard["order"], key=bool)
        self._trial = Trial(order, heard["laps"], running=0)
        self._is_ranked = True
        self._laps.restart()
        if self._trial.is_over:
            self._conclude()

    def settled(self, is_regular: bool) -> Candidate | None:
        """Record a settled backward of the plan in force; return the plan to use now, if it changes. Collective."""
        trial = self._trial
        if trial is None or trial.is_over:
            return None
        turn = trial.settled(is_regular)
        if turn is Turn.MARK:
            self._laps.mark()
        elif turn is Turn.RESTART:
            self._laps.restart()
        if turn is not Turn.SWITCH:
            return None
        before = trial.current
        is_over = trial.finish(self._agree() if trial.is_measured else None)
        self._laps.restart()
        self.plan = self._candidates[trial.current].plan
        if is_over:
            self._conclude()
        return None if trial.current == before else self._candidates[trial.current]

    def _agree(self) -> float:
        """Return the median step of the slowest worker. Collective."""
        mine = round(self._laps.median_s() * 1e9)
        return max(row[0] for row in self._team.gather_ints([mine], "the times of a plan")) / 1e9

    def _conclude(self) -> None:
        """Say in the plan what was tried, and remember it for later runs."""
        trial = self._trial
        assert trial is not None
        ranked = sorted(range(len(self._candidates)), key=self._predicted_s.__getitem__)
        tried = tuple(
            Tried(self._candidates[number].name, self._predicted_s[number], trial.measured_s.get(number))
            for number in ranked
        )
        kept = self._candidates[trial.current]
        self.has_losers = True
        if trial.was_given_up:
            # Some plans may have had no turn: the next run tries again.
            self.plan = dataclasses.replace(kept.plan, tried=tried if trial.measured_s else ())
            return
        self.plan = dataclasses.replace(kept.plan, tried=tried)
        if self._team.rank == 0 and self._choices is not None:
            self._choices.write({"name": kept.name, "tried": [dataclasses.asdict(one) for one in tried]})

    def _hear(self, answer: Any) -> Any:
        """Return what rank 0 says. Collective."""
        return self._team.gather_json(answer)[0]


def open_choosing(team: Team, routes: Routes, tries: bool, device: torch.device) -> Choosing:
    """Return the choice for a model on ``device``; ``tries``: the front end allows trials. Collective."""
    mode = settings.TRIALS.read()
    # Plans round differently, and which is fastest may differ from run to run.
    tries = tries and mode != "0" and not torch.are_deterministic_algorithms_enabled()
    mine = [int(tries), _kernel_number(), _device_number(device)]
    everybody = team.gather_ints(mine, "the choice of a plan")
    crowd = max(Counter(number for _, number, _ in everybody).values())
    sharing = max(Counter(number for _, _, number in everybody).values())
    is_cuda = device.type == "cuda"
    equipment = Equipment(
        routes=routes,
        is_nccl=is_cuda and team.is_nccl,
        compacts=is_cuda and importlib.util.find_spec("triton") is not None,
        cores=_cores() / crowd,
        uses_cores=not is_cuda,
        sharing=sharing if is_cuda else 1.0,
    )
    choices = Choices(cache_folder(), reads=mode != "fresh") if all(can for can, _, _ in everybody) else None
    return Choosing(team, equipment, Laps(device), choices)


def _kernel_number() -> int:
    """Return a number that workers have in common if one kernel, and thus one set of cores, runs them."""
    try:
        return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    except OSError:
        return zlib.crc32(socket.gethostname().encode())


def _device_number(device: torch.device) -> int:
    """Return a number that workers have in common if they share one GPU; 0 for a processor."""
    if device.type != "cuda":
        return 0
    return zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
