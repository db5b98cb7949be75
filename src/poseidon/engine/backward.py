"""Step 2 of the journey: every item leaves by its route as soon as it is ready.

Before: ``hooks.py`` reports that a parameter's gradient is final. After: an exchanger under ``poseidon/routes`` moves
the item. :class:`~poseidon.engine.step.Step` decides; :class:`Backward` carries out its actions on real tensors and a
real team, and holds this backward's contributions and the exchanges under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from poseidon.engine.aside import aside
from poseidon.engine.rollcall import RollCall, pack_flags, unpack_flags
from poseidon.engine.step import Action, Call, Compare, Completed, Start, Step, Tell, Verdict
from poseidon.engine.stopwatch import Stopwatch
from poseidon.planning.route import Delivery
from poseidon.planning.schedule import Schedule
from poseidon.routes.base import Brought, Exchange, Exchanger, LiveItem
from poseidon.team.gathering import PendingGather
from poseidon.team.team import Team


@dataclass(frozen=True, eq=False)
class LiveSchedule:
    """A schedule with its tensors and exchangers."""

    schedule: Schedule
    items: tuple[LiveItem, ...]
    exchangers: Mapping[str, Exchanger]
    """By route."""
    deliveries: Sequence[Delivery]
    """By unit: what its route needs, its gradient, factors or rows."""

    def reordered(self, queue: str, order: Sequence[int]) -> LiveSchedule:
        """Return a copy with one queue reordered."""
        return replace(self, schedule=self.schedule.reordered(queue, order))


@dataclass(frozen=True, eq=False)
class Flight:
    """Gradients under way together: their parameters, and how to land them."""

    parameters: Sequence[nn.Parameter]
    land: Callable[[], None]
    """Wait for the means and store them in ``.grad``."""


@dataclass(frozen=True)
class Landing:
    """A closed backward, whose gradients may still be under way."""

    flights: Sequence[Flight]
    must_land: bool
    """Some landing is collective, so all workers must land everything now, in this order."""


class Backward:
    """One backward under way. Not thread-safe; the engine holds a lock around it."""

    def __init__(
        self,
        live: LiveSchedule,
        step: Step,
        team: Team,
        brought: Sequence[Brought],
        stopwatch: Stopwatch[int] | None = None,
    ) -> None:
        self.live = live
        self.step = step
        self.brought = brought
        """By unit."""
        self.stopwatch = stopwatch
        """Records when items become complete; None if nobody needs the times."""
        self._team = team
        self._exchanges: dict[int, Exchange] = {}
        self._flagged_late: list[int] = []
        """Items whose flags are not known yet."""
        self._calls: PendingGather | None = None
        self._flags: PendingGather | None = None
        self._used: PendingGather | None = None
        self._words: Sequence[int] = ()
        """This worker's roll call, as the others hear it."""
        self._called: Sequence[RollCall] = ()
        """The workers' roll calls, once they were read."""
        self._heard: Sequence[Sequence[int]] = ()
        """The workers' flags, if they were asked for before the rest."""
        clock = team.watch.clock
        self._spans = None if clock is None else clock.spans
        """Where times go if this step is recorded in full."""
        self._left_at: dict[int, float] = {}

    def begin(self, unused: Collection[int]) -> None:
        """Send the roll call and start; ``unused`` are parameters that get no gradient on this worker."""
        self._perform(self.step.begin(unused))

    def gradient(self, parameter: int, is_dense: bool) -> None:
        """Record that a parameter's gradient is final; ``is_dense``: autograd left a full gradient in ``.grad``."""
        brought = self.brought[self.live.schedule.model.unit_of[parameter]]
        brought.has_dense |= is_dense
        if actions := self.step.gradient(parameter, is_dense or not brought.is_empty):
            self._perform(actions)

    def head(self, unit: int, gradient: Tensor, is_last: bool) -> None:
        """Add to the full gradient of a tied unit's head, and let it leave if this was its last call."""
        brought = self.brought[unit]
        brought.give_head(gradient)
        if is_last:
            (parameter,) = self.live.schedule.model.parameters_of[unit]
            live = self.live.items[self.live.schedule.item_of[parameter]]
            self.live.exchangers[live.item.route].start_early(live, brought, self.step.number)

    def close(self) -> list[int]:
        """Start all remaining items; return the parameters that fell short (:meth:`Step.close`)."""
        actions, forgotten = self.step.close()
        self._perform(actions)
        for number in self._flagged_late:
            self._perform(self.step.flag(number, self._exchanges[number].flags))
        self._perform(self.step.tell())
        return forgotten

    def hear(self, used: Sequence[bool] = ()) -> Verdict:
        """Wait for what the others told; ``used``: parameters that any worker uses, if known beforehand."""
        calls = self._called or self._hear_calls()
        flags = () if self._flags is None else self._heard or self._flags("the others' flags")
        told = [used] if used else []
        if self._used is not None:
            rows = self._used("the others' used parameters")
            told = [unpack_flags(row, len(self.step.schedule.model.parameters)) for row in rows]
        verdict = self.step.hear(calls, flags, self._team.rank, told)
        for item, heard in verdict.flags.items():
            self._exchanges[item].heed(heard)
        return verdict

    def must_land(self) -> bool:
        """Wait for the others' flags; return whether some landing is collective, as all workers find then."""
        if self._flags is None:
            return False
        self._hear_calls()
        self._heard = self._flags("the others' flags")
        return any(map(any, self._heard))

    def _hear_calls(self) -> Sequence[RollCall]:
        """Wait for the others' roll calls, before all else: a worker that is out of step may tell other things."""
        assert self._calls is not None
        mine, words = self.step.call, self._calls("the others to start backward")
        self._called = [mine if row == self._words else RollCall.from_words(row) for row in words]
        for other, call in enumerate(self._called):
            if call is not mine:
                mine.check(call, self._team.rank, other)
        return self._called

    def flights(self) -> list[Flight]:
        """Return everything under way, in an order in which all workers can land it."""
        return [
            Flight(self.live.items[item].parameters, lambda item=item: self._land(item))  # type: ignore[misc]
            for item in self.live.schedule.landing_order
        ]

    def _land(self, number: int) -> None:
        verdict, live = self.step.verdict, self.live.items[number]
        assert verdict is not None
        numbers = live.item.parameters
        used = [verdict.used[parameter] for parameter in numbers] if verdict.used else [True] * len(numbers)
        with aside():
            # Removed first, so that its memory is freed as it lands.
            exchange = self._exchanges.pop(number)
            # A short form brings all gradients of its unit: one that nobody wants, of a frozen bias, stays as it is.
            spared = [] if all(used) or not any(used) or live.bucket is not None else _spare(live.parameters, used)
            exchange.finish(any(used))
            for parameter, gradient in spared:
                parameter.grad = gradient
            if not all(used):
                exchange.take_back(used)
            del exchange
            if live.bucket is not None:
                live.bucket.unpack(used)
        if self._spans is not None and number in self._left_at:
            name = f"{live.item.route} {live.item.name}"
            self._spans.append(("item", name, self._left_at[number], time.monotonic()))
        self.step.land(number)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                actions += self._start(action.item)
            elif isinstance(action, Completed):
                assert self.stopwatch is not None
                self.stopwatch.mark_ready(action.item)
            elif isinstance(action, Call):
                self._words = action.roll_call.words()
                self._calls = self._team.start_gather(self._words)
            elif isinstance(action, Compare):
                self._flags = self._team.start_gather(action.flags)
            else:
                assert isinstance(action, Tell)
                self._used = self._team.start_gather(pack_flags(action.used))

    def _start(self, number: int) -> list[Action]:
        if torch.is_grad_enabled():  # backward(create_graph=True): the exchange itself is no part of the graph
            with torch.no_grad():
                return self._start(number)
        live = self.live.items[number]
        if self._spans is not None:
            self._left_at[number] = time.monotonic()
        parts = [self.brought[unit] for unit in live.item.units]
        for part in parts:
            if part.streams:  # a call for every parameter of a bucket would be many
                part.join_streams()
        exchange = self.live.exchangers[live.item.route].start(live, parts, self.step.number)
        self._exchanges[number] = exchange
        if self.stopwatch is not None:
            self.stopwatch.mark_landed(number, exchange.join_stream)
        if exchange.has_late_flags:
            self._flagged_late.append(number)
            return self.step.started(number, None)
        return self.step.started(number, exchange.flags)


def _spare(parameters: Sequence[nn.Parameter], used: Sequence[bool]) -> list[tuple[nn.Parameter, Tensor | None]]:
    """Take the gradients of parameters that nobody used away, and return them."""
    spared = [(parameter, parameter.grad) for parameter, is_used in zip(parameters, used, strict=True) if not is_used]
    for parameter, _ in spared:
        parameter.grad = None
    return spared
