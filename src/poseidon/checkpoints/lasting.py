"""A training that lasts while workers come and go: all go on from the last complete step, which each has in memory.

``Checkpoint.run`` in an elastic job. When workers are lost or join, an epoch ends. Those of the next one meet, whoever
has the newest step hands it to all who lack it (``sharing.py``), and the training function is called again. Workers
that are about to join copy most of it beforehand (``ahead.py``).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

from torch import nn

from poseidon.checkpoints.ahead import Ahead, StateDoor, copy_ahead, open_door
from poseidon.checkpoints.ending import EndRequests
from poseidon.checkpoints.memory import Kept, StepMemory, copy_over
from poseidon.checkpoints.program import ProgramState
from poseidon.checkpoints.replicas import Replicator, hand_on, sharded_members
from poseidon.checkpoints.saving import Saving
from poseidon.checkpoints.sharing import Agreement, HandedOver, Stock, agree, hand_over
from poseidon.checkpoints.states import forget_step, holds, host_copy, load_into, state_of
from poseidon.errors import ConfigError, MismatchError, WorkerLostError
from poseidon.job.elastic import ElasticJob
from poseidon.team.epochs import enter_next_epoch, is_interruption, living_on
from poseidon.team.watch import number_steps_from

_MOST_CHANGES = 20
"""So often in a row may the workers of an epoch fail to meet."""
_MOST_IDLE = 3
"""So often in a row may the same number of workers meet again without having completed a step: then a program's own
deadlock, which looks like lost workers to those who wait too long, ends it."""


class LastingRun:
    """Runs a training function through the epochs of an elastic job, and keeps its last complete step."""

    def __init__(
        self, job: ElasticJob, program: ProgramState, saving: Saving, ending: EndRequests, replicas: int
    ) -> None:
        self.job = job
        self.is_running = False
        self.handed: HandedOver | None = None
        """How this worker got its state when it joined."""
        self._program = program
        self._saving = saving
        self._ending = ending
        self._memory = StepMemory()
        self._replicator = Replicator(replicas)
        self._door: StateDoor | None = None
        self._modes: list[tuple[nn.Module, bool]] = []
        """Whether each module was in training mode after the last complete step."""
        self._ahead: Ahead | None = None
        """What a joiner has copied before it takes its seat."""

    def run(self, train: Callable[[int], object]) -> None:
        """Resume, and call ``train`` with the number of steps done, again whenever workers change."""
        if self.is_running:
            raise ConfigError("checkpoint: run() is called inside the function that it runs; call it once")
        self.is_running = True
        job = self.job
        lost: BaseException | None = None
        done, idle = -1, 0
        try:
            if job.seat is None:
                self._ahead = copy_ahead(job, self._program.is_alike)
                lost = WorkerLostError("this worker joins a job that is under way")
            elif job.is_over:
                lost = WorkerLostError("a worker was lost before the training began")
            self._door = open_door(job, self._memory)
            while True:
                try:
                    if lost is not None:
                        before = done, self._size
                        done = self._change(lost)
                        idle = idle + 1 if before == (done, self._size) else 0
                        if idle:
                            text = f"after step {done} the same {self._size} workers met again: {lost}"
                            self._saving.warn([text])
                        lost = None
                    elif done < 0:
                        done = self._begin()
                    number_steps_from(done)
                    train(done)
                    for part in sharded_members().values():
                        part.complete()  # while its owners are there
                    # Together: somebody whose last step was interrupted needs those who have completed it.
                    if self._saving.team is not None:
                        self._saving.team.gather_ints([0], "all workers to finish")
                    return
                except Exception as error:
                    kept = self._memory.kept
                    is_stuck = idle >= _MOST_IDLE and kept is not None and kept.step == done
                    if is_stuck or not is_interruption(job, error):
                        raise
                    lost = _bare(error)
        finally:
            self.is_running = False
            if self._door is not None:
                job.door = 0
                self._door.close()

    @property
    def _size(self) -> int:
        return 1 if self._saving.team is None else self._saving.team.size

    def _change(self, error: BaseException) -> int:
        """Go on with the workers of the next epoch, from the newest step that any of them has completed."""
        for attempt in itertools.count(1):
            try:
                self._ending.forget()
                self._saving.part(error)
                enter_next_epoch(self.job, error, self.end_if_asked)
                self._saving.meet()
                return self._share()
            except Exception as failure:
                if attempt >= _MOST_CHANGES or not is_interruption(self.job, failure):
                    raise
                error = _bare(failure)
        raise AssertionError

    def end_if_asked(self) -> None:
        """End a worker that got a signal while it waits for others; the step that it keeps is saved first."""
        number = self._ending.number
        if not number:
            return
        self._ending.obey()
        kept, folder = self._memory.kept, self._saving.folder
        if kept is not None and kept.dealt and folder is not None:
            self._saving.warn(
                [f"step {kept.step} is not saved: this worker has only its own part of it, and ends alone"]
            )
        elif kept is not None and folder is not None:
            state = {"step": kept.step, "values": kept.values, "parts": kept.parts, "workers": [kept.own]}
            folder.write(kept.step, host_copy(state))
        raise SystemExit(128 + number)

    def _share(self) -> int:
        """Let all workers have the newest state in memory, and load it. Collective; returns its number of steps."""
        team, kept = self._saving.team, self._memory.kept
        # Used once: what an interrupted hand-over leaves is of no step.
        ahead, self._ahead = self._ahead, None
        lent = {} if self._door is None else self._door.lent
        staged = self._replicator.staged
        mine = Stock.of(kept, ahead, lent, staged)
        stocks = [mine] if team is None else [Stock.read(one) for one in team.gather_json(mine.facts())]
        agreed = agree(stocks)
        newest = agreed.newest
        self._replicator.forget()
        if newest < 0:
            return self._begin(is_alike=False)
        if agreed.lost:
            return self._begin_without(agreed)
        shards = agreed.shards_of(kept, staged)
        own = None if kept is None else kept.own
        if team is not None and any(each.step < newest for each in stocks):
            kept, self.handed = hand_over(team, stocks, kept, ahead, lent, self._program.is_alike)
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

    def _begin(self, is_alike: bool = True) -> int:
        """Resume from disk, or begin; ``is_alike``: the objects were made together. Collective.

        Returns the number of steps done.
        """
        self._saving.warn(self._program.find_missing(living_on()))
        done = self._saving.resume()
        self.keep(done)
        if not done and not is_alike:
            self._make_alike()
        return done

    def _make_alike(self) -> None:
        """Let all workers have the objects of rank 0, since they were made apart. Collective."""
        team, kept = self._saving.team, self._memory.kept
        assert kept is not None
        if team is not None:
            if team.rank != 0:
                # If this is interrupted, what was made here must not pass for a step that all have.
                self._memory.forget()
            stocks = [Stock(0 if rank == 0 else -1) for rank in range(team.size)]
            given, _ = hand_over(team, stocks, kept if team.rank == 0 else None, None, {}, is_alike=False)
            given.own = kept.own
            self._take_over(given, is_new=False)
            self._memory.adopt(given)

    def _begin_without(self, agreed: Agreement) -> int:
        """Go on from a checkpoint on disk, since a part of the last complete step is gone. Collective."""
        what = ", ".join(f"shard {number} of {agreed.dealt[member].shards}" for member, number in agreed.lost)
        gone = f"{what} of the optimizer's state after step {agreed.newest} is lost, with its owner and its"
        for part in self._program.parts.values():
            forget_step(part)
        done = self._saving.resume()
        if not done:
            raise ConfigError(
                f"checkpoint: {gone} replicas, and no checkpoint was saved; save some (every=) or keep more replicas "
                f"(replicas={self._replicator.count + 1})"
            )
        self._saving.warn([f"{gone} replicas; the job goes on from the checkpoint of step {done}"])
        self.keep(done)
        return done

    def _take_over(self, kept: Kept, is_new: bool) -> None:
        """Go on from a state; of a joiner, or of a worker that was a step behind, it gets what is its own."""
        program = self._program
        self._saving.warn(program.check_names(kept.parts, kept.step))
        for name, part in program.parts.items():
            forget_step(part)
            load_into(part, copy_over(kept.parts[name], None))
        program.values = copy_over(kept.values, None)
        for module, is_training in self._modes:
            module.training = is_training  # the interruption may have come in the middle of an evaluation
        self._saving.claim_folder()
        if is_new:
            program.draw_anew(kept.step, self._saving.rank)
        else:
            for name, part in program.own.items():
                part.load_state_dict(copy_over(kept.own[name], None))
        kept.own = copy_over({name: part.state_dict() for name, part in program.own.items()}, kept.own)
        self._verify_others()

    def _verify_others(self) -> None:
        """See that workers also agree on distributed models that no part holds: they did not come with the state."""
        parts = self._program.parts
        for member in living_on():
            if isinstance(member, nn.Module) and not any(holds(part, member) for part in parts.values()):
                try:
                    member.verify_replicas()
                except MismatchError as error:
                    raise MismatchError(
                        f"checkpoint: a distributed model is not among its parts ({', '.join(parts)}), and a "
                        f"worker that joined has another one; name every model in the checkpoint ({error})"
                    ) from None

    def keep(self, done: int) -> None:
        """Keep everything as it is after a complete step. Collective."""
        program = self._program
        for part in program.parts.values():
            finish = getattr(part, "finish_step", None)
            if finish is not None:
                finish()
        self._modes = [
            (module, module.training)
            for part in (*program.parts.values(), *living_on())
            if isinstance(part, nn.Module)
            for module in part.modules()
        ]
        epoch = 0 if self.job.seat is None else self.job.seat.epoch
        before = self._memory.kept
        staged = self._replicator.stage(self._saving.team, epoch, done, before)
        with contextlib.ExitStack() as stack:
            for each in sharded_members().values():
                stack.enter_context(each.as_is())
            parts = {name: state_of(part) for name, part in program.parts.items()}
            own = {name: part.state_dict() for name, part in program.own.items()}
            # Not before: until here a lost worker may still interrupt.
            self._memory.keep(done, parts, own, program.values, staged.shards, staged.dealt)
        self._replicator.recycle(before)


def _bare(error: BaseException) -> BaseException:
    """Return an error without its traceback and causes: with them goes what the interrupted step holds."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
