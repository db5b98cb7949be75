"""The server's own steps in an elastic job: what one worker alone has is copied after each step, and dealt anew.

``served.py`` leaves the optimizer's state of each chunk, and some exact weights, with its owner. Here they become
shards (``checkpoints/shards.py``), of which ``poseidon.Checkpoint`` keeps replicas on other machines. When workers are
lost or join, everybody gets the exact weights; the owners of the new epoch, which the first backward finds, get their
state at the first step, each from those who have it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon.checkpoints.shards import (
    Inheritance,
    RunState,
    ValueRun,
    assemble,
    plan_parts,
    take_parts,
)
from poseidon.engine.aside import in_private
from poseidon.engine.engine import Engine
from poseidon.engine.served import ServedUpdates
from poseidon.errors import UnsupportedError
from poseidon.routes.shard import Piece, flat_memory
from poseidon.team.mail import Tag
from poseidon.team.team import Team

_WHAT = "the optimizer's state of the last complete step"


class LastingUpdates(ServedUpdates):
    """Steps on the server that go on with other workers; a :class:`~poseidon.checkpoints.shards.Sharded`."""

    is_lasting = True

    def __init__(self, optimizer: Optimizer, max_grad_norm: float | None = None) -> None:
        super().__init__(optimizer, max_grad_norm)
        self._members: list[nn.Parameter] = []
        """All parameters, in an order that all workers have."""
        self._inheritance: Inheritance | None = None
        """The state, until the owners of this epoch are known and have taken it."""
        self._is_bare = False

    @property
    def sharded(self) -> LastingUpdates:
        """Return this object."""
        return self

    def renewed(self) -> LastingUpdates:
        """Return updates of the same optimizer, among other workers."""
        return LastingUpdates(self.optimizer, self._max_grad_norm)

    def connect(self, module: nn.Module, engine: Engine | None) -> None:
        """Take over the optimizer's steps."""
        super().connect(module, engine)
        self._members = [*module.parameters()]

    # What the checkpoint asks.

    @property
    def is_inheriting(self) -> bool:
        """Whether the state is still where the last epoch left it."""
        return self._inheritance is not None

    @contextlib.contextmanager
    def as_is(self) -> Iterator[None]:
        """Let model and optimizer show what this worker has, in place of asking others for the rest."""
        if self._engine is None:
            yield
            return
        with self._lock, in_private():
            full = self.optimizer.__dict__["state"]
            is_spread = self._exchanger is not None or self._inheritance is not None
            # Each worker steps parameters without values by itself.
            served = {parameter for parameter in self.engine.parameters if parameter.numel()} if is_spread else set()
            # This worker may have looked at all of it, and the others not.
            rest = {parameter: entry for parameter, entry in full.items() if parameter not in served}
            self.optimizer.__dict__["state"], self._is_bare = defaultdict(dict, rest), True
            try:
                yield
            finally:
                self.optimizer.__dict__["state"], self._is_bare = full, False

    def run_states(self) -> list[RunState] | None:
        """Return the state of the pieces owned here, as it is: copy it before the next step."""
        if self._engine is None or self._exchanger is None:
            return None
        with self._lock, self._broken_by_errors(), in_private():
            shard = self.exchanger.shard
            if self._inheritance is not None:  # the first step was left out
                for piece, entry in self._take_state().items():
                    shard.state[piece.held] = entry
            self.exchanger.await_steps()
            in_hand = shard.state_in_hand(self.optimizer.__dict__["state"]) if self._has_state else None
            numbers = self._numbers()
            return [
                RunState(
                    ValueRun(numbers[piece.parameter], piece.start, piece.stop),
                    shard.state.get(piece.held, {}) if in_hand is None else in_hand.get(piece, {}),
                    self._exact_of(piece),
                )
                for piece in shard.pieces
            ]

    def inherit(self, inheritance: Inheritance) -> None:
        """Go on from the state of earlier owners: now if this worker is alone, otherwise at the first step."""
        with self._lock:
            if self._engine is None:
                self._take_everything(inheritance)
            else:
                self._inheritance = inheritance

    def set_exact(self, run: ValueRun, values: Tensor) -> None:
        """Put exact weights in place."""
        with self._lock, in_private():
            flat_memory(self._members[run.parameter])[run.start : run.stop].copy_(values)

    def complete(self) -> None:
        """Put in place what this worker needs of others after the training. Collective."""
        if self._engine is None:
            return
        self.finish()
        with self._lock, self._broken_by_errors():
            self._fetch_exact(self._rounding.rounded)
            if self._inheritance is not None:  # there was no step since the workers changed
                self._take_everything(self._inheritance)
                self._inheritance = None

    # What the optimizer asks.

    def show_state(self) -> None:
        """Put the whole state of the optimizer in place."""
        if self._is_bare:
            return
        if self._inheritance is not None:
            raise UnsupportedError(
                f"rank {self.engine.team.rank} looked at the optimizer's state after workers were lost or had joined, "
                'before the next step(); with update="server" it has no owners until then, so look at it after step()'
            )
        super().show_state()

    def take_state(self) -> None:
        """Note that the state was replaced."""
        super().take_state()
        self._inheritance = None

    # Inside.

    def _numbers(self) -> dict[nn.Parameter, int]:
        return {parameter: number for number, parameter in enumerate(self._members)}

    def _exact_of(self, piece: Piece) -> Tensor | None:
        """Return the weights of a piece, if other workers may have them rounded."""
        if piece.parameter not in self._rounding.candidates:
            return None
        if piece.parameter in self._rounding.rounded:
            return piece.held.detach()
        return flat_memory(piece.parameter)[piece.start : piece.stop]

    def _take_state(self) -> dict[Piece, dict[str, Any]]:
        if self._inheritance is None:
            return super()._take_state()
        pieces, numbers, team = self.exchanger.shard.pieces, self._numbers(), self._inheritance.team
        assert team is not None
        wanted = [
            [ValueRun(numbers[parameter], start, stop) for parameter, start, stop in runs]
            for runs in self.exchanger.runs_by_owner()
        ]
        dealt = deal(self._inheritance, team, wanted, [piece.held.device for piece in pieces])
        self._inheritance, self._has_state = None, False
        return {piece: entry for piece, entry in zip(pieces, dealt, strict=True) if entry}

    def _take_everything(self, inheritance: Inheritance) -> None:
        """Let the user's optimizer have the whole state. Collective."""
        sources, rows = inheritance.sources, [each.copy.row if each.copy else None for each in inheritance.sources]
        wanted = [ValueRun(*each["run"]) for source in sources for each in source.manifest]
        parts = plan_parts(sources, wanted)
        came: dict[int, Tensor] = {}
        for holder in sorted({source.holder for source in sources}):
            mine = [part for part in parts if sources[part.source].holder == holder]
            is_here = inheritance.team is None or holder == inheritance.team.rank
            size = sum(part.stop - part.start for part in mine)
            came[holder] = take_parts(mine, rows) if is_here else torch.empty(size, dtype=torch.uint8, device="cpu")
            if inheritance.team is not None and size:
                for future in inheritance.team.start_broadcast(came[holder].numpy().data, holder):
                    inheritance.team.result(future, _WHAT)
        devices = [self._members[run.parameter].device for run in wanted]
        with in_private():
            state = self.optimizer.__dict__["state"]
            for run, entry in zip(wanted, assemble(sources, wanted, parts, came, devices), strict=True):
                parameter = self._members[run.parameter]
                for key, value in entry.items():
                    if isinstance(value, Tensor) and value.shape == (run.stop - run.start,):
                        if key not in state[parameter]:
                            state[parameter][key] = torch.empty_like(
                                parameter.detach(), dtype=value.dtype, device=value.device
                            )
                        flat_memory(state[parameter][key])[run.start : run.stop] = value
                    else:
                        state[parameter][key] = value


def deal(
    inheritance: Inheritance, team: Team, wanted: list[list[ValueRun]], devices: list[torch.device]
) -> list[dict[str, Any]]:
    """Return the state of the runs that this worker owns now, ``wanted`` by rank. Collective."""
    sources = inheritance.sources
    rows = [None if source.copy is None else source.copy.row for source in sources]
    parts = [plan_parts(sources, each) for each in wanted]
    channel = team.mail.new_channel()
    came: dict[int, Tensor] = {}
    arrivals, leaving = [], []
    for holder in sorted({source.holder for source in sources}):
        mine = [part for part in parts[team.rank] if sources[part.source].holder == holder]
        if holder == team.rank:
            came[holder] = take_parts(mine, rows)
            continue
        came[holder] = torch.empty(sum(part.stop - part.start for part in mine), dtype=torch.uint8, device="cpu")
        if len(came[holder]):
            arrivals.append(team.mail.expect(holder, Tag(channel, 0), came[holder].numpy().data))
    for peer in range(team.size):
        theirs = [part for part in parts[peer] if sources[part.source].holder == team.rank]
        if peer != team.rank and theirs:
            leaving.append(team.mail.send(peer, Tag(channel, 0), take_parts(theirs, rows).numpy().data))
    for arrival in arrivals:
        team.result(arrival, _WHAT)
    for future in leaving:
        team.result(future, _WHAT)
    return assemble(sources, wanted[team.rank], parts[team.rank], came, devices)
