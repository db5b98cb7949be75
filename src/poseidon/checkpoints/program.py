"""The objects of a training program as a checkpoint sees them: equal on all workers, or each worker's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from poseidon.checkpoints.states import (
    LossyState,
    RandomState,
    Stateful,
    check_part,
    find_lossy,
    load_into,
    parts_that_differ,
)
from poseidon.errors import ConfigError


class ProgramState:
    """What a training program needs to go on."""

    def __init__(self, parts: Mapping[str, Stateful], per_worker: Mapping[str, Stateful]) -> None:
        if not parts:
            raise ConfigError(
                "checkpoint: nothing to save; name what to save, such as model=model, optimizer=optimizer"
            )
        for name, part in (*parts.items(), *per_worker.items()):
            check_part(name, part)
        shared, own = parts_that_differ(parts)
        self.values: dict[str, Any] = {}
        """Plain values."""
        self.parts: dict[str, Stateful] = {**parts, **shared}
        """What is equal on all workers..."""
        self.own: dict[str, Stateful] = {**per_worker, **find_lossy(parts), "random numbers": RandomState(), **own}
        """... and what is not."""
        self.is_alike = not (shared or own)
        """Whether all workers hold the same in :attr:`parts`; otherwise one worker's count."""
        self._has_warned = False
        self._extra = frozenset(shared)
        """Parts that the checkpoint of a run without local steps lacks: then a round begins with what it has."""

    def check_names(self, stored: Mapping[str, Any], step: int) -> list[str]:
        """Raise :class:`ConfigError` unless all parts are among the stored ones; return what to warn of."""
        missing = sorted(self.parts.keys() - stored.keys() - self._extra)
        unknown = sorted(stored.keys() - self.parts.keys())
        if missing:
            has = ", ".join(sorted(stored))
            raise ConfigError(f"the checkpoint of step {step} has no {', '.join(missing)}; it has {has}")
        if unknown:
            return [f"the checkpoint also has {', '.join(unknown)}, which this program does not ask for"]
        return []

    def find_missing(self, members: Iterable[object]) -> list[str]:
        """Return what to warn of, if an optimizer that belongs to a distributed model is no part."""
        known = [inner for part in self.parts.values() for inner in (part, getattr(part, "optimizer", None))]
        found = [getattr(member, "stepped_optimizer", None) for member in members]
        return [
            f"the {type(one).__name__} of a distributed model is not among its parts ({', '.join(self.parts)}): a "
            "worker that joins would have another state of it; name every optimizer in the checkpoint"
            for one in found
            if one is not None and not any(one is other for other in known)
        ]

    def find_half_steps(self) -> list[str]:
        """Return what to warn of, once, if gradients are here that no exchange, and so no step, may have used."""
        names = [name for name, part in self.parts.items() if getattr(part, "is_accumulating", False)]
        if not names or self._has_warned:
            return []
        self._has_warned = True
        return [
            f"step() was called while gradients of {', '.join(names)} from a backward under no_sync() are here. If "
            "optimizer.step() has not used them, whoever goes on from here lacks them: call it after optimizer.step()"
        ]

    def load(self, state: Mapping[str, Any], rank: int, size: int) -> list[str]:
        """Go on from a checkpoint, as one of ``size`` workers; return what to warn of."""
        stored = state["parts"]
        for name, part in self.parts.items():
            if name in stored:
                load_into(part, stored[name])
        self.values = dict(state["values"])
        workers = state["workers"]
        warnings = self._deal_lossy(workers, rank, size)
        if rank < len(workers):
            for name, part in self.own.items():
                if name in workers[rank] and not isinstance(part, LossyState):
                    part.load_state_dict(workers[rank][name])
        else:
            self.draw_anew(int(state["step"]), rank)
        return warnings

    def draw_anew(self, step: int, rank: int) -> None:
        """Give a worker that was not there before its own random numbers, which must not be another's."""
        torch.manual_seed(torch.initial_seed() + step * 65537 + rank)

    def _deal_lossy(self, workers: Sequence[Mapping[str, Any]], rank: int, size: int) -> list[str]:
        """Let each worker have what it kept itself; of other numbers of workers, some have several shares or none."""
        warnings = []
        for name, part in self.own.items():
            if isinstance(part, LossyState):
                part.load_shares([one[name] for one in workers[rank::size] if name in one])
                if len(workers) != size and name in workers[0]:
                    fate = f"dealt to {size}; its sum stays" if size > 1 else "dropped: one worker loses nothing"
                    warnings.append(f"{name}: what {len(workers)} workers kept is {fate}")
        return warnings
