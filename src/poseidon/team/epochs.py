"""From one epoch of an elastic job to the next, in the same processes: everything between workers is made anew.

Whatever connects workers and should live on registers with :func:`live_on`. All of them leave the old epoch, torch's
process group is ended and made again among the workers of the new one, and all of them enter it, in the order in which
they were made.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from poseidon.errors import MismatchError, UnsupportedError, WorkerLostError
from poseidon.job.elastic import NEWS_S, ElasticJob, this_job
from poseidon.job.world import World, init
from poseidon.team.team import forget_groups

_log = logging.getLogger(__name__)


class EpochMember(Protocol):
    """Something of this worker that is connected with the others."""

    def leave_epoch(self, error: BaseException) -> None:
        """Close what connects it; the connections are cut already, because of ``error``."""

    def enter_epoch(self) -> None:
        """Connect it with the workers of the new epoch. Collective."""

    def verify_replicas(self) -> None:
        """Raise :class:`~poseidon.errors.MismatchError` unless all workers hold the same bits. Collective."""


_NUMBERS = itertools.count()
_MEMBERS: weakref.WeakValueDictionary[int, EpochMember] = weakref.WeakValueDictionary()


def live_on(member: EpochMember) -> None:
    """Let an object live on from epoch to epoch; it is not kept alive by this."""
    _MEMBERS[next(_NUMBERS)] = member


def living_on() -> list[EpochMember]:
    """Return what lives on from epoch to epoch, in the order in which it was made."""
    return [member for _, member in sorted(_MEMBERS.items())]


def is_interruption(job: ElasticJob, error: BaseException) -> bool:
    """Return whether an exception means that workers were lost, and not that the program is wrong."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, WorkerLostError):
            return True
        found = found.__cause__ or found.__context__
    # torch's collectives fail with a plain RuntimeError, maybe before the launcher has noticed.
    may_be = isinstance(error, RuntimeError | OSError) and not isinstance(error, UnsupportedError | MismatchError)
    return job.is_over or (may_be and job.wait_for_end(NEWS_S))


def refuse_elastic(what: str) -> None:
    """Raise :class:`~poseidon.errors.UnsupportedError` in an elastic job, for what cannot live on in the next epoch."""
    if this_job() is not None:
        raise UnsupportedError(
            f"{what} in an elastic job (--nodes, --nproc MIN:MAX) cannot go on without a lost worker; give a fixed "
            "number of workers, or train PyTorch models inside poseidon.Checkpoint.run"
        )


def outlives(error: BaseException) -> bool:
    """Return whether this worker goes on although an object could not be connected, since workers were lost.

    So it is before the training: until ``poseidon.Checkpoint.run``, where all meet anew, this worker is alone then.
    """
    job = this_job()
    if job is None or not is_interruption(job, error):
        return False
    job.leave()
    return True


def enter_next_epoch(job: ElasticJob, error: BaseException, look: Callable[[], None] = lambda: None) -> World:
    """Leave the present epoch, wait for the next one, and enter it. Fails if that one ends meanwhile.

    ``look`` is called now and then while it waits, and may raise.
    """
    job.leave()
    members = living_on()
    for member in members:
        try:
            member.leave_epoch(error)
        except Exception as failure:
            # What could not be closed is cut; its threads end by themselves.
            _log.debug("leaving an epoch: %s", failure, exc_info=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_groups()
    job.arrive(look)
    world = init()
    if job.is_over:
        raise WorkerLostError("the epoch was over before its workers had met")
    for member in members:
        member.enter_epoch()
    return world
