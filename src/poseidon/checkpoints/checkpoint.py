"""``poseidon.Checkpoint``: a job that goes on where it ended, whoever ended it and on however many workers.

::

    with poseidon.Checkpoint("saved", every=500, model=model, optimizer=optimizer) as checkpoint:
        for step in range(checkpoint.resume(), steps):
            train(step)
            checkpoint.step(step + 1)

One worker copies the states and writes them on a thread of its own. Whoever has the newest intact checkpoint on its
disk hands it to all others, so no shared disk is needed.

In an elastic job :meth:`Checkpoint.run` calls a training function again whenever workers are lost or join, with
everything as it was after the last complete step, which every worker keeps in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from poseidon import files
from poseidon.checkpoints.ahead import Ahead, StateDoor, copy_ahead, open_door
from poseidon.checkpoints.folder import CheckpointFolder, read
from poseidon.checkpoints.memory import Kept, StepMemory, copy_over
from poseidon.checkpoints.replicas import Replicator, hand_on, sharded_members
from poseidon.checkpoints.sharing import Agreement, HandedOver, Stock, agree, hand_out, hand_over
from poseidon.checkpoints.states import (
    LossyState,
    RandomState,
    Stateful,
    as_bytes,
    check_part,
    check_readable,
    find_lossy,
    forget_step,
    from_bytes,
    holds,
    host_copy,
    load_into,
    parts_that_differ,
    state_of,
)
from poseidon.checkpoints.writing import CheckpointWriter
from poseidon.errors import ConfigError, MismatchError, WorkerLostError
from poseidon.job.elastic import ElasticJob, this_job
from poseidon.job.limits import time_limit
from poseidon.launch.stopping import Stopping
from poseidon.team.epochs import enter_next_epoch, is_interruption, living_on, outlives
from poseidon.team.team import Team

_MOST_CHANGES = 20
"""So often in a row may the workers of an epoch fail to meet."""


class Checkpoint:
    """Saves and restores everything that a training program needs to go on. Construction is collective.

    ``parts`` are the program's objects by name: anything with ``state_dict()`` and ``load_state_dict()``. They are
    taken to be equal on all workers, and rank 0's are saved; of those in ``per_worker`` each worker's own is, and of
    all of them if a model among them takes local steps. The random numbers of Python, NumPy and torch are saved for
    each worker without being named, and so is what a model distributed with ``lossy`` keeps.

    Without a ``folder`` nothing is written to disk; an elastic job still goes on from memory.

    A checkpoint is written after every ``every`` steps or ``every_s`` seconds, and the newest ``keep`` stay. A worker
    that gets SIGTERM or SIGINT first completes the step, on all workers, and saves; then all end with the status of
    that signal (``on_signal=False`` leaves signals alone).

    In an elastic job with ``update="server"``, what one worker alone has is also kept on ``replicas`` other machines.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        every: int | None = None,
        every_s: float | None = None,
        keep: int = 3,
        on_signal: bool = True,
        replicas: int = 1,
        per_worker: Mapping[str, Stateful] | None = None,
        timeout_s: float | None = None,
        **parts: Stateful,
    ) -> None:
        _check_amount("every", every, 1)
        _check_amount("every_s", every_s, 0.0)
        _check_amount("keep", keep, 1)
        _check_amount("replicas", replicas, 1)
        if not parts:
            raise ConfigError(
                "checkpoint: nothing to save; name what to save, such as model=model, optimizer=optimizer"
            )
        for name, part in (*parts.items(), *(per_worker or {}).items()):
            check_part(name, part)
        self.values: dict[str, Any] = {}
        """Plain values that are saved too, and are back after :meth:`resume`: an epoch, a best loss."""
        if folder is None and (every is not None or every_s is not None):
            raise ConfigError("checkpoint: every and every_s need a folder to write to")
        self._folder = None if folder is None else CheckpointFolder(folder, keep)
        self._every = every
        self._every_s = every_s
        shared, own = parts_that_differ(parts)
        self._parts = {**parts, **shared}
        self._extra = frozenset(shared)
        """Parts that the checkpoint of a run without local steps lacks: then a round begins with what it has."""
        lossy = find_lossy(parts)
        self._own: dict[str, Any] = {**(per_worker or {}), **lossy, "random numbers": RandomState(), **own}
        self._timeout_s = time_limit(timeout_s)
        self._team: Team | None = None
        self._job = this_job()
        self._memory = StepMemory()
        self._replicator = Replicator(replicas)
        self._door: StateDoor | None = None
        self._ahead: Ahead | None = None
        """What a joiner has copied before it takes its seat."""
        self.handed: HandedOver | None = None
        """How this worker got its state when it joined an elastic job."""
        self._is_running = False
        self._stopping = Stopping() if on_signal else None
        if self._stopping is not None:
            self._stopping.__enter__()
        self._pending: Callable[[str], list[list[int]]] | None = None
        """Flags on their way from all workers."""
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._is_checked = False
        there = [] if self._folder is None else [one.step for one in self._folder.saved()]
        self._others = there
        """Steps of the checkpoints that rank 0 found; empty once they are known to be this job's."""
        try:
            self._team = self._gather_team()
            self._others = there if self._team is None else self._team.gather_json(there)[0]
        except Exception as error:
            if not outlives(error):
                raise
        self._writer: CheckpointWriter | None = None
        self._choose_writer()

    def _gather_team(self) -> Team | None:
        return Team(None, self._timeout_s) if dist.is_initialized() and dist.get_world_size() > 1 else None

    def _choose_writer(self) -> None:
        """Let rank 0 write, whoever that is now."""
        if self._rank == 0 and self._writer is None and self._folder is not None:
            self._writer = CheckpointWriter(self._folder)
        elif self._rank != 0 and self._writer is not None:  # this worker was alone before it joined
            self._writer.close()
            self._writer = None

    @property
    def _rank(self) -> int:
        return 0 if self._team is None else self._team.rank

    def resume(self) -> int:
        """Load the newest checkpoint of any worker into all of them; return its number of steps, or 0. Collective."""
        newest, problems = (None, []) if self._folder is None else self._folder.newest()
        mine: dict[str, Any] = {"step": -1 if newest is None else newest.step, "problems": problems}
        everybody = [mine] if self._team is None else self._team.gather_json(mine)
        self._warn([problem for one in everybody for problem in one["problems"]])
        source = max(range(len(everybody)), key=lambda rank: (everybody[rank]["step"], -rank))
        if everybody[source]["step"] < 0:
            if self._folder is not None and everybody[0]["problems"]:
                raise ConfigError(f"checkpoint: none in {self._folder.path} is intact; move them away to begin anew")
            return 0
        self._others = []
        held, problem = b"", ""
        if source == self._rank:
            assert newest is not None
            try:
                held = files.read_bytes(newest.path, "checkpoint", limit=files.memory_bytes())
            except ConfigError as error:
                problem = str(error)
        state = read(
            hand_out(self._team, held, problem, source),
            f"the checkpoint of step {everybody[source]['step']} of rank {source}",
        )
        self._load(state)
        return int(state["step"])

    def run(self, train: Callable[[int], object]) -> None:
        """Resume, and call ``train`` with the number of steps done; in an elastic job, again when workers change.

        ``train`` goes on from there to the end of the training and calls :meth:`step` after each step. Before it is
        called again, everything is as after the last complete step, and ranks are dealt anew; what depends on the rank
        or the number of workers belongs into it. No other exception calls it again.
        """
        job = self._job
        if job is None:
            train(self.resume())
            return
        if self._is_running:
            raise ConfigError("checkpoint: run() is called inside the function that it runs; call it once")
        self._is_running = True
        lost: BaseException | None = None
        done = -1
        try:
            if job.seat is None:
                self._ahead = copy_ahead(job)
                lost = WorkerLostError("this worker joins a job that is under way")
            elif job.is_over:
                lost = WorkerLostError("a worker was lost before the training began")
            self._door = open_door(job, self._memory)
            while True:
                try:
                    if lost is not None:
                        done = self._change(job, lost)
                        lost = None
                    elif done < 0:
                        done = self._begin()
                    train(done)
                    for part in sharded_members().values():
                        part.complete()  # while its owners are there
                    # Together: somebody whose last step was interrupted needs those who have completed it.
                    if self._team is not None:
                        self._team.gather_ints([0], "all workers to finish")
                    return
                except Exception as error:
                    if not is_interruption(job, error):
                        raise
                    lost = error.with_traceback(None)  # with it goes what the interrupted step holds
                    lost.__context__ = lost.__cause__ = None
        finally:
            self._is_running = False
            if self._door is not None:
                job.door = 0
                self._door.close()

    def _change(self, job: ElasticJob, error: BaseException) -> int:
        """Go on with the workers of the next epoch, from the newest step that any of them has completed."""
        for attempt in itertools.count(1):
            try:
                team, self._team = self._team, None
                self._pending = None
                if team is not None:
                    team.drop(error)
                enter_next_epoch(job, error, self._end_if_asked)
                self._team = self._gather_team()
                self._choose_writer()
                return self._share()
            except Exception as failure:
                if attempt >= _MOST_CHANGES or not is_interruption(job, failure):
                    raise
                error = failure.with_traceback(None)
                error.__context__ = error.__cause__ = None
        raise AssertionError

    def _end_if_asked(self) -> None:
        """End a worker that got a signal while it waits for others; the step that it keeps is saved first."""
        number = 0 if self._stopping is None else self._stopping.number
        if not number:
            return
        assert self._stopping is not None
        self._stopping.number = 0  # obeyed
        kept = self._memory.kept
        if kept is not None and kept.dealt and self._folder is not None:
            self._warn([f"step {kept.step} is not saved: this worker has only its own part of it, and ends alone"])
        elif kept is not None and self._folder is not None:
            state = {"step": kept.step, "values": kept.values, "parts": kept.parts, "workers": [kept.own]}
            self._folder.write(kept.step, host_copy(state))
        raise SystemExit(128 + number)

    def _share(self) -> int:
        """Let all workers have the newest state in memory, and load it. Collective; returns its number of steps."""
        team, kept = self._team, self._memory.kept
        # Used once: what an interrupted hand-over leaves is of no step.
        ahead, self._ahead = self._ahead, None
        lent = {} if self._door is None else self._door.lent
        staged = self._replicator.staged
        mine = Stock.of(kept, ahead, lent, staged)
        stocks = [mine] if team is None else [Stock.read(one) for one in team.gather_json(mine.facts())]
        agreed = agree(stocks)
        newest = agreed.newest
        self._saved_step = None  # a joiner knows of no save, and saving is collective
        self._replicator.forget()
        if newest < 0:
            return self._begin() or self._begin_alike()
        if agreed.lost:
            return self._begin_without(agreed)
        shards = agreed.shards_of(kept, staged)
        own = None if kept is None else kept.own
        if team is not None and any(each.step < newest for each in stocks):
            kept, self.handed = hand_over(team, stocks, kept, ahead, lent)
        assert kept is not None
        self._take_over(kept, is_new=own is None)
        hand_on(team, agreed.sources, shards)
        kept.shards, kept.dealt = shards, dict(agreed.dealt)
        if kept is not self._memory.kept:
            self._memory.adopt(kept)
        self._replicator.staged = None
        if self._door is not None:
            self._door.settle()
        return newest

    def _begin(self) -> int:
        """Resume from disk, or begin. Collective; returns the number of steps done."""
        done = self.resume()
        self._keep(done)
        return done

    def _begin_alike(self) -> int:
        """Let all workers have the objects of rank 0, since they were made apart. Collective."""
        team, kept = self._team, self._memory.kept
        assert kept is not None
        if team is not None:
            stocks = [Stock(0 if rank == 0 else -1) for rank in range(team.size)]
            given, _ = hand_over(team, stocks, kept if team.rank == 0 else None, None, {})
            given.own = kept.own
            self._take_over(given, is_new=False)
            self._memory.adopt(given)
        return 0

    def _begin_without(self, agreed: Agreement) -> int:
        """Go on from a checkpoint on disk, since a part of the last complete step is gone. Collective."""
        what = ", ".join(f"shard {number} of {agreed.dealt[member].shards}" for member, number in agreed.lost)
        gone = f"{what} of the optimizer's state after step {agreed.newest} is lost, with its owner and its"
        for part in self._parts.values():
            forget_step(part)
        done = self.resume()
        if not done:
            raise ConfigError(
                f"checkpoint: {gone} replicas, and no checkpoint was saved; save some (every=) or keep more replicas "
                f"(replicas={self._replicator.count + 1})"
            )
        self._warn([f"{gone} replicas; the job goes on from the checkpoint of step {done}"])
        self._keep(done)
        return done

    def _take_over(self, kept: Kept, is_new: bool) -> None:
        """Go on from a state; of a joiner, or of a worker that was a step behind, it gets what is its own."""
        self._check_names(kept.parts, kept.step)
        for name, part in self._parts.items():
            forget_step(part)
            load_into(part, copy_over(kept.parts[name], None))
        self.values = copy_over(kept.values, None)
        self._others = []
        if is_new:
            torch.manual_seed(torch.initial_seed() + kept.step * 65537 + self._rank)
        else:
            for name, part in self._own.items():
                part.load_state_dict(copy_over(kept.own[name], None))
        kept.own = copy_over({name: part.state_dict() for name, part in self._own.items()}, kept.own)
        self._verify_others()

    def _verify_others(self) -> None:
        """See that workers also agree on distributed models that no part holds: they did not come with the state."""
        for member in living_on():
            if isinstance(member, nn.Module) and not any(holds(part, member) for part in self._parts.values()):
                try:
                    member.verify_replicas()
                except MismatchError as error:
                    raise MismatchError(
                        f"checkpoint: a distributed model is not among its parts ({', '.join(self._parts)}), and a "
                        f"worker that joined has another one; name every model in the checkpoint ({error})"
                    ) from None

    def _keep(self, done: int) -> None:
        """Keep everything as it is after a complete step."""
        for part in self._parts.values():
            finish = getattr(part, "finish_step", None)
            if finish is not None:
                finish()
        epoch = 0 if self._job is None or self._job.seat is None else self._job.seat.epoch
        before = self._memory.kept
        staged = self._replicator.stage(self._team, epoch, done, before)
        with contextlib.ExitStack() as stack:
            for each in sharded_members().values():
                stack.enter_context(each.as_is())
            parts = {name: state_of(part) for name, part in self._parts.items()}
            own = {name: part.state_dict() for name, part in self._own.items()}
            # Not before: until here a lost worker may still interrupt.
            self._memory.keep(done, parts, own, self.values, staged.shards, staged.dealt)
        self._replicator.recycle(before)

    def step(self, done: int) -> None:
        """Say that ``done`` steps are complete: saves if that is due, and ends the program if asked to. Collective."""
        if self._is_running:
            self._keep(done)
        self._refuse_others()
        due_s = self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s
        number = 0 if self._stopping is None else self._stopping.number
        signals, is_late = self._agree(number, due_s)
        asked = max(signals, default=0)
        is_leaving = self._is_running and set(signals) == {0, signal.SIGTERM}  # not all of them: the others go on
        if (asked and not is_leaving) or is_late or (self._every is not None and done % self._every == 0):
            self.save(done)
        if is_leaving and not signals[self._rank]:
            raise WorkerLostError("a worker leaves: the epoch ends with this step")
        if self._is_running and self._job is not None and self._job.is_wanted and not asked:
            raise WorkerLostError("others join: the epoch ends with this step")
        if asked:
            if self._writer is not None:
                self._writer.finish()
            if self._stopping is not None:
                self._stopping.number = 0  # obeyed
            if is_leaving and self._job is not None:
                self._job.resign()
            raise SystemExit(128 + asked)

    def save(self, done: int) -> None:
        """Save now, after ``done`` steps. Collective; returns as soon as the states are copied."""
        self._refuse_others()
        if self._folder is None:
            return
        self._saved_at = time.monotonic()
        if done == self._saved_step:
            return
        self._saved_step = done
        self._check_once()
        own = as_bytes({name: host_copy(part.state_dict()) for name, part in self._own.items()})
        everybody = [own] if self._team is None else self._team.gather_bytes(own, "the states of all workers")
        if self._writer is not None:
            state = {
                "step": done,
                "values": host_copy(self.values),
                "parts": {name: host_copy(state_of(part)) for name, part in self._parts.items()},
                "workers": [from_bytes(one) for one in everybody],
            }
            self._writer.put(done, state)

    def close(self) -> None:
        """Write what is left, and let signals be handled as before."""
        stopping, self._stopping = self._stopping, None
        if stopping is not None:
            stopping.__exit__()
        if self._writer is not None:
            self._writer.close()
        team, self._team = self._team, None
        if team is not None:
            team.close()
        if stopping is not None and stopping.number:
            # It came after the last step.
            signal.raise_signal(stopping.number)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_others(self) -> None:
        if self._others and self._folder is not None:
            raise ConfigError(
                f"checkpoint: {self._folder.path} has {len(self._others)} checkpoints, the newest of step "
                f"{self._others[-1]}; call resume() before the first step, or use another folder to begin anew"
            )

    def _check_once(self) -> None:
        """See that everything can be read back, before anybody relies on it."""
        if not self._is_checked:
            self._is_checked = True
            saved = self._parts if self._writer is not None else {}
            for name, part in (*saved.items(), *self._own.items()):
                check_readable(name, state_of(part))
        check_readable("values", self.values)

    def _agree(self, number: int, is_late: bool) -> tuple[list[int], bool]:
        """Return the workers' signals, and whether rank 0's time is over, as of the step before. Collective.

        What is sent now is read at the next step, so nobody waits for it.
        """
        if self._team is None:
            return [number], is_late
        if self._stopping is None and self._every_s is None:
            return [], False
        flags = [] if self._pending is None else self._pending("the workers' agreement on a checkpoint")
        self._pending = self._team.start_gather([number, int(is_late)])
        return [row[0] for row in flags], bool(flags) and bool(flags[0][1])

    def _load(self, state: Mapping[str, Any]) -> None:
        stored = state["parts"]
        self._check_names(stored, int(state["step"]))
        for name, part in self._parts.items():
            if name in stored:
                load_into(part, stored[name])
        self.values = dict(state["values"])
        workers = state["workers"]
        self._deal_lossy(workers)
        if self._rank < len(workers):
            for name, part in self._own.items():
                if name in workers[self._rank] and not isinstance(part, LossyState):
                    part.load_state_dict(workers[self._rank][name])
        else:
            # A worker that was not there: its own random numbers, which must not be another's.
            torch.manual_seed(torch.initial_seed() + int(state["step"]) * 65537 + self._rank)

    def _deal_lossy(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Let each worker have what it kept itself; of other numbers of workers, some have several shares or none."""
        size = 1 if self._team is None else self._team.size
        for name, part in self._own.items():
            if isinstance(part, LossyState):
                part.load_shares([one[name] for one in workers[self._rank :: size] if name in one])
                if len(workers) != size and name in workers[0]:
                    fate = "dealt to {size}; its sum stays" if size > 1 else "dropped: one worker loses nothing"
                    self._warn([f"{name}: what {len(workers)} workers kept is {fate.format(size=size)}"])

    def _check_names(self, stored: Mapping[str, Any], step: int) -> None:
        missing = sorted(self._parts.keys() - stored.keys() - self._extra)
        unknown = sorted(stored.keys() - self._parts.keys())
        if missing:
            has = ", ".join(sorted(stored))
            raise ConfigError(f"the checkpoint of step {step} has no {', '.join(missing)}; it has {has}")
        if unknown:
            self._warn([f"the checkpoint also has {', '.join(unknown)}, which this program does not ask for"])

    def _warn(self, problems: list[str]) -> None:
        if self._rank == 0:
            for problem in problems:
                warnings.warn(f"checkpoint: {problem}", stacklevel=3)


def _check_amount(name: str, value: float | None, least: float) -> None:
    if value is not None and not (isinstance(value, int | float) and least <= value < math.inf):
        raise ConfigError(f"checkpoint: {name}={value!r}, expected at least {least:g}")
