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

from poseidon.job.elastic import ElasticJob
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
    for member in members:
        member.enter_epoch()
    return world
