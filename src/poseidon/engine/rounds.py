"""Rounds of local steps: which fragment leaves after which step, when it takes effect, and what a checkpoint keeps.

:class:`LocalRounds` is told of every step of a worker. All workers call it alike, so the same fragments leave in the
same order everywhere; it waits for the others only where a fragment must have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon.engine.outer import Fragment, Outer, Read, make_outer
from poseidon.errors import ConfigError
from poseidon.planning.local import LocalSchedule


class Averaging(Protocol):
    """Averages a fragment over the workers."""

    size: int
    """How many they are."""
    checks: bool
    """Whether workers compare the outer parameters at each exchange."""

    def start(self, number: int, fragment: int, flats: Sequence[Tensor]) -> Landed:
        """Begin to replace each of ``flats`` by its mean; ``number`` counts all exchanges. Never blocks."""

    def rests(self) -> Mapping[int, Tensor]:
        """Return what compression has left out of this worker's changes so far; the tensors are those in use."""

    def differ(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Raise the error for outer parameters that differ between workers. Collective."""

    def close(self) -> None:
        """Flush what is queued, and stop the threads."""


class Landed(Protocol):
    """A fragment under way."""

    def __call__(self) -> None:
        """Wait until the means are in place."""


class AveragingAlone:
    """The averaging of a single worker: its own values are the mean."""

    size = 1
    checks = False

    def start(self, number: int, fragment: int, flats: Sequence[Tensor]) -> Landed:  # noqa: ARG002, D102
        return lambda: None

    def rests(self) -> Mapping[int, Tensor]:  # noqa: D102
        return {}

    def differ(self, named: Sequence[tuple[str, Tensor]]) -> None:  # noqa: D102
        raise AssertionError(f"one worker differs from itself in {named[0][0]}")

    def close(self) -> None:  # noqa: D102
        pass


@dataclass
class _Flight:
    """A fragment that has left and not taken effect."""

    due: int
    """After how many steps it does."""
    landed: Landed | None
    """None once its mean has arrived and the outer parameters have been stepped."""


class LocalRounds:
    """Counts a worker's steps and exchanges fragments when they are due.

    ``kept`` is the weight of a worker's own parameters where a fragment takes effect later than it has left.
    """

    def __init__(
        self,
        parts: Sequence[Mapping[str, nn.Parameter]],
        buffers: Mapping[str, Read],
        schedule: LocalSchedule,
        outer: Outer,
        kept: float,
    ) -> None:
        self.schedule = schedule
        last = len(parts) - 1
        self.fragments = [
            Fragment(_name(number, len(parts)), part, buffers if number == last else {})
            for number, part in enumerate(parts)
        ]
        self.outer: Optimizer = make_outer(outer, [p for fragment in self.fragments for p in fragment.outer])
        """Steps the outer parameters."""
        self.exchanges = 0
        """Exchanges begun so far."""
        self._kept = kept
        self._averaging: Averaging = AveragingAlone()
        self._step = 0
        """Steps since the first of a round that all workers began alike."""
        self._since = [0] * len(parts)
        """By fragment: steps since it left, the same on all workers."""
        self._taken = [0] * len(parts)
        """By fragment: steps that this worker has taken since; with exchanges by time, samples."""
        self._flights: dict[int, _Flight] = {}
        self._began_s = time.monotonic()

    @property
    def size_bytes(self) -> int:
        """Bytes of all fragments."""
        return sum(fragment.size_bytes for fragment in self.fragments)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of these that are buffers."""
        return self.size_bytes - sum(p.numel() * p.element_size() for each in self.fragments for p in each.outer)

    def average_by(self, averaging: Averaging) -> None:
        """Average over other workers than this one alone."""
        self._averaging = averaging

    def step(self, samples: int = 1) -> None:
        """Count a step of this worker and exchange what is due."""
        by_time = not self.schedule.every
        for fragment in range(len(self.fragments)):
            self._taken[fragment] += samples if by_time else 1
        if by_time:
            if time.monotonic() - self._began_s >= self.schedule.every_s:
                self._exchange_all(is_active=True)
            return
        self._advance(self._step + 1)
        leaving = self.schedule.leaving(self._step)
        if leaving is not None:
            self._leave(leaving, is_active=True)
            if not self.schedule.overlap:
                self._take_effect(leaving, 0.0)

    def finish(self) -> None:
        """Wait until the mean of every fragment under way has arrived; when it takes effect does not change."""
        for fragment in self._flights:
            self._arrive(fragment)

    def synchronize(self) -> None:
        """Exchange now what is left, so that all workers hold the outer parameters; a new round begins. Collective."""
        self._exchange_all(is_active=True)

    def drain(self) -> None:
        """Take part in the others' exchanges until no worker trains any more; all hold the same parameters then."""
        if not self.schedule.every:
            while self._exchange_all(is_active=False):
                pass
            return
        while True:
            self._advance(self.schedule.next_leaving(self._step))
            leaving = self.schedule.leaving(self._step)
            assert leaving is not None
            self._leave(leaving, is_active=False)
            self._arrive(leaving)
            if not self.fragments[leaving].has_active():
                break
        self._exchange_all(is_active=False)

    def take_loaded(self, loaded: Collection[int]) -> None:
        """Agree on what these tensors, by id(), hold: it was loaded, and is the same on all workers.

        If that is the whole model, a round begins.
        """
        self.finish()
        adopted = [fragment.adopt(loaded) for fragment in self.fragments]
        if all(adopted):
            self._begin_round()

    def restart(self) -> None:
        """Begin a round from this worker's own parameters, which are the same on all workers."""
        self.finish()
        for fragment in self.fragments:
            fragment.adopt()
        self._begin_round()

    def close(self) -> None:
        """Stop exchanging."""
        self._averaging.close()

    # What a checkpoint keeps.

    def agreed(self) -> dict[str, Tensor]:
        """Return the outer parameters and buffers by name, once what is under way has arrived."""
        self.finish()
        return {name: value for fragment in self.fragments for name, value in fragment.agreed().items()}

    def shared_state(self) -> dict[str, Any]:
        """Return what all workers hold alike, besides :meth:`agreed`."""
        agreed = self.agreed()
        own = self._own()
        return {
            "exchanges": self.exchanges,
            "step": self._step,
            "since": list(self._since),
            "due": {fragment: flight.due for fragment, flight in self._flights.items()},
            "names": [name for fragment in self.fragments for name in fragment.names],
            "outer": self.outer.state_dict(),
            "wide": {name: value for name, value in agreed.items() if value.dtype != own[name].dtype},
        }

    def own_state(self) -> dict[str, Any]:
        """Return what is this worker's own."""
        self.finish()
        rests = {"workers": self._averaging.size, "values": dict(self._averaging.rests())}
        return {"exchanges": self.exchanges, "taken": list(self._taken), "values": self._own(), "rests": rests}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the model's own parameters are the outer ones of that state."""
        self.restart()
        names = [name for fragment in self.fragments for name in fragment.names]
        if sorted(state["names"]) != sorted(names):
            odd = sorted(set(state["names"]) ^ set(names))[0]
            raise ConfigError(f"the saved outer parameters are not this model's: {odd} is in one of them only")
        agreed = {name: value for fragment in self.fragments for name, value in fragment.agreed().items()}
        for name, value in state["wide"].items():
            agreed[name].copy_(value)
        self.outer.load_state_dict(_reordered(state["outer"], state["names"], names))
        self.exchanges = state["exchanges"]
        if len(state["since"]) == len(self.fragments):
            # With another number of fragments a new round begins: these are no longer the same parts.
            self._step, self._since = state["step"], list(state["since"])
            self._flights = {int(fragment): _Flight(due, None) for fragment, due in state["due"].items()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on with this worker's own parameters, unless they are from before the last exchange.

        What compression has left out is of use only among as many workers: others round other parts.
        """
        if state["exchanges"] != self.exchanges or len(state["taken"]) != len(self.fragments):
            return
        own = self._own()
        for name, value in state["values"].items():
            own[name].copy_(value)
        self._taken = list(state["taken"])
        for place, rest in self._averaging.rests().items():
            found = state["rests"]["values"].get(place)
            is_same = found is not None and state["rests"]["workers"] == self._averaging.size
            rest.copy_(found) if is_same and found.shape == rest.shape else rest.zero_()

    # Inside.

    def _own(self) -> dict[str, Tensor]:
        return {name: value for fragment in self.fragments for name, value in fragment.own().items()}

    def _advance(self, step: int) -> None:
        """Count the steps up to ``step``, and let take effect what is due."""
        self._since = [since + step - self._step for since in self._since]
        self._step = step
        for fragment in [each for each, flight in self._flights.items() if flight.due <= step]:
            self._take_effect(fragment, self._kept)

    def _leave(self, fragment: int, is_active: bool) -> None:
        taken, since = self._taken[fragment], self._since[fragment]
        weight = float(taken) if not self.schedule.every else taken / since if since else 0.0
        one = self.fragments[fragment]
        one.collect(weight, is_active, self._averaging.checks)
        self.exchanges += 1
        landed = self._averaging.start(self.exchanges, fragment, one.flats)
        self._flights[fragment] = _Flight(self._step + self.schedule.overlap, landed)
        self._since[fragment] = self._taken[fragment] = 0

    def _arrive(self, fragment: int) -> None:
        """Wait for a fragment's mean, and step the outer parameters."""
        flight, one = self._flights[fragment], self.fragments[fragment]
        if flight.landed is None:
            return
        flight.landed()
        flight.landed = None
        if not one.is_agreed(self._averaging.size):
            self._averaging.differ([pair for each in self.fragments for pair in each.agreed().items()])
        if one.has_weight():
            one.absorb(self.outer)

    def _take_effect(self, fragment: int, kept: float) -> None:
        self._arrive(fragment)
        del self._flights[fragment]
        self.fragments[fragment].mix(kept)

    def _exchange_all(self, is_active: bool) -> bool:
        """Exchange every fragment that any worker has stepped; return whether any worker still trains."""
        self.finish()
        has_active = False
        for fragment, one in enumerate(self.fragments):
            if self._since[fragment] or not self.schedule.every:
                self._leave(fragment, is_active)
                self._arrive(fragment)
                has_active = one.has_active()
            elif fragment not in self._flights:
                # What all agreed on is in place, but for what somebody changed since: the next exchange carries that.
                continue
            one.mix(0.0)
        self._begin_round()
        return has_active

    def _begin_round(self) -> None:
        self._step = 0
        self._since = [0] * len(self.fragments)
        self._taken = [0] * len(self.fragments)
        self._flights.clear()
        self._began_s = time.monotonic()


def _name(number: int, count: int) -> str:
    return "the outer parameters" if count == 1 else f"the outer parameters, fragment {number + 1} of {count}"


def _reordered(state: Mapping[str, Any], before: Sequence[str], now: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state for parameters in another order."""
    if list(before) == list(now):
        return dict(state)
    if len(state["param_groups"]) != 1:
        raise ConfigError("the saved outer optimizer has several groups of parameters, which were cut differently")
    place = {name: number for number, name in enumerate(now)}
    held = {place[before[number]]: value for number, value in state["state"].items()}
    return {"state": held, "param_groups": state["param_groups"]}
