"""Uneven inputs: what a worker does after its last batch, so that the others can continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn
from torch.distributed.algorithms.join import JoinHook

from poseidon.engine.discover import tensors_of
from poseidon.engine.engine import Engine
from poseidon.team.mirror import mirror_all
from poseidon.team.team import Team


class Joining(Protocol):
    """What join() needs from a wrapper."""

    module: nn.Module
    forward_sync_buffers: bool
    _team: Team | None
    _engine: Engine | None
    _ignored: set[str]
    require_forward_param_sync: bool
    _authoritative_rank: int | None

    def sync_buffers(self, source: int) -> None:
        """Copy one worker's buffers."""


class ShadowHook(JoinHook):
    """Contributes nothing to every exchange of the others, and copies the final model at the end."""

    def __init__(self, owner: Joining) -> None:
        assert owner._team is not None
        assert owner._engine is not None
        self._owner = owner
        self._team: Team = owner._team
        self._engine: Engine = owner._engine

    def announce(self, is_synced: bool) -> int:
        """Tell workers without further input what this worker's next forward and backward exchange.

        Returns the worker whose buffers count: rank 0 may have no input any more.
        """
        self._engine.forget_cleared()
        words = [1, int(is_synced), int(self._engine.will_be_dense()), int(self._owner.require_forward_param_sync)]
        return _source(self._team.gather_ints(words, "the others' next batch"))

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        calls = self._team.gather_ints([0, 0, 0, 0], "the others' next batch")
        active = [call for call in calls if call[0]]
        if any(call[3] for call in active):
            self._owner.sync_buffers(_source(calls))
        if any(call[1] for call in active):
            self._engine.shadow_backward(is_dense=any(call[2] for call in active))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a worker that trained to the end."""
        claims = self._team.gather_ints([int(is_last_joiner)], "the end of join()")
        source = self._owner._authoritative_rank = max(rank for rank, (claim,) in enumerate(claims) if claim)
        tensors = tensors_of(self._owner.module, self._owner._ignored, self._owner.forward_sync_buffers)
        mirror_all(self._team, tensors, source, "the final model")
        self._engine.taken = 0  # those without input have taken fewer steps, which this has made good


def _source(calls: Sequence[Sequence[int]]) -> int:
    return max(rank for rank, call in enumerate(calls) if call[0])
