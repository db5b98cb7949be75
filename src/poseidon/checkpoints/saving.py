"""Saving to disk and resuming from it: rank 0 writes, and whoever has the newest intact checkpoint hands it to all."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch.distributed as dist

from poseidon import files
from poseidon.checkpoints.folder import CheckpointFolder, read
from poseidon.checkpoints.program import ProgramState
from poseidon.checkpoints.replicas import sharded_members
from poseidon.checkpoints.sharing import hand_out
from poseidon.checkpoints.states import as_bytes, check_readable, from_bytes, host_copy, state_of
from poseidon.checkpoints.writing import CheckpointWriter
from poseidon.errors import ConfigError
from poseidon.team.epochs import outlives
from poseidon.team.team import Team


class Saving:
    """The checkpoints of a program in a folder, and the team that saves and resumes. Construction is collective."""

    def __init__(self, folder: CheckpointFolder | None, program: ProgramState, timeout_s: float) -> None:
        self.folder = folder
        self.team: Team | None = None
        """None: this worker is alone."""
        self.writer: CheckpointWriter | None = None
        """None: another worker writes, or nobody."""
        self.saved_at = time.monotonic()
        self._program = program
        self._timeout_s = timeout_s
        self._saved_step: int | None = None
        self._is_checked = False
        there = [] if folder is None else [one.step for one in folder.saved()]
        self._others = there
        """Steps of the checkpoints that rank 0 found; empty once they are known to be this job's."""
        try:
            self.team = self._gather_team()
            self._others = there if self.team is None else self.team.gather_json(there)[0]
        except Exception as error:
            if not outlives(error):
                raise
        self._choose_writer()

    def _gather_team(self) -> Team | None:
        return Team(None, self._timeout_s) if dist.is_initialized() and dist.get_world_size() > 1 else None

    def _choose_writer(self) -> None:
        """Let rank 0 write, whoever that is now."""
        if self.rank == 0 and self.writer is None and self.folder is not None:
            self.writer = CheckpointWriter(self.folder)
        elif self.rank != 0 and self.writer is not None:  # this worker was alone before it joined
            self.writer.close()
            self.writer = None

    @property
    def rank(self) -> int:
        """Return this worker's rank in its team."""
        return 0 if self.team is None else self.team.rank

    def part(self, error: BaseException) -> None:
        """Leave the team, since an epoch has ended with this error."""
        team, self.team = self.team, None
        if team is not None:
            team.drop(error)

    def meet(self) -> None:
        """Meet the workers of a new epoch. Collective."""
        self.team = self._gather_team()
        self._choose_writer()
        self._saved_step = None  # a joiner knows of no save, and saving is collective

    def resume(self) -> int:
        """Load the newest checkpoint of any worker into all of them; return its number of steps, or 0. Collective."""
        newest, problems = (None, []) if self.folder is None else self.folder.newest()
        mine: dict[str, Any] = {"step": -1 if newest is None else newest.step, "problems": problems}
        everybody = [mine] if self.team is None else self.team.gather_json(mine)
        self.warn([problem for one in everybody for problem in one["problems"]])
        source = max(range(len(everybody)), key=lambda rank: (everybody[rank]["step"], -rank))
        if everybody[source]["step"] < 0:
            if self.folder is not None and any(one["problems"] for one in everybody):
                raise ConfigError(
                    f"checkpoint: none in {self.folder.path} is intact, on any worker; move them away to begin anew"
                )
            return 0
        self.claim_folder()
        held, problem = b"", ""
        if source == self.rank:
            assert newest is not None
            try:
                held = files.read_bytes(newest.path, "checkpoint", limit=files.memory_bytes())
            except ConfigError as error:
                problem = str(error)
        state = read(
            hand_out(self.team, held, problem, source),
            f"the checkpoint of step {everybody[source]['step']} of rank {source}",
        )
        self.warn(self._program.check_names(state["parts"], int(state["step"])))
        self.warn(self._program.load(state, self.rank, 1 if self.team is None else self.team.size))
        return int(state["step"])

    def claim_folder(self) -> None:
        """Note that the checkpoints that are there are this job's."""
        self._others = []

    def refuse_others(self) -> None:
        """Raise :class:`ConfigError` if the folder may hold another job's checkpoints."""
        if self._others and self.folder is not None:
            raise ConfigError(
                f"checkpoint: {self.folder.path} has {len(self._others)} checkpoints, the newest of step "
                f"{self._others[-1]}; call resume() before the first step, or use another folder to begin anew"
            )

    def save(self, done: int) -> None:
        """Save now, after ``done`` steps. Collective; returns as soon as the states are copied."""
        self.refuse_others()
        if self.folder is None:
            return
        self.saved_at = time.monotonic()
        if done == self._saved_step:
            return
        if self.writer is not None:
            self.writer.claim()
        self._saved_step = done
        for part in sharded_members().values():
            part.complete()  # all workers are here: what rank 0 reads below has owners
        self._check_once()
        program = self._program
        own = as_bytes({name: host_copy(part.state_dict()) for name, part in program.own.items()})
        everybody = [own] if self.team is None else self.team.gather_bytes(own, "the states of all workers")
        if self.writer is not None:
            state = {
                "step": done,
                "values": host_copy(program.values),
                "parts": {name: host_copy(state_of(part)) for name, part in program.parts.items()},
                "workers": [from_bytes(one) for one in everybody],
            }
            self.writer.put(done, state)

    def wait_for_writer(self) -> None:
        """Wait until rank 0 has written all: whoever ends before may end the job with it. Collective."""
        if self.team is not None and self.folder is not None:
            self.team.gather_ints([0], "the checkpoint to be written")

    def _check_once(self) -> None:
        """See that everything can be read back, before anybody relies on it."""
        if not self._is_checked:
            self._is_checked = True
            saved = self._program.parts if self.writer is not None else {}
            for name, part in (*saved.items(), *self._program.own.items()):
                check_readable(name, state_of(part))
        check_readable("values", self._program.values)

    def warn(self, problems: list[str]) -> None:
        """Let rank 0 warn the user, who has called a method that called the caller."""
        if self.rank == 0:
            for problem in problems:
                warnings.warn(f"checkpoint: {problem}", stacklevel=4)

    def close(self) -> None:
        """Write what is left, and leave the team."""
        if self.writer is not None:
            self.writer.close()
        team, self.team = self.team, None
        if team is not None:
            team.close()
