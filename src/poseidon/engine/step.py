"""One step as a state machine: what is missing, what may start, what is under way, and the step's phase. Pure.

Events go in, actions come out as data; ``backward.py`` carries them out. There are no sockets, threads, tensors or
optimizers here, so tests can try every order of events in one process (``tests/unit/engine/test_step.py``).

::

    OPEN --close()--> CLOSED --hear()--> SETTLED --the last land()--> LANDED        any --fail()--> BROKEN

Not thread-safe: the engine holds a lock around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from poseidon.engine.rollcall import RollCall
from poseidon.errors import UnsupportedError
from poseidon.planning.schedule import Schedule


class Phase(Enum):
    """The phases of a step."""

    OPEN = "open"
    """Gradients arrive and items start."""
    CLOSED = "closed"
    """Backward is over on this worker, and every item has started."""
    SETTLED = "settled"
    """The others' roll calls and flags are known, so items may land."""
    LANDED = "landed"
    """Every mean has landed."""
    BROKEN = "broken"
    """An error ended the step; the replicas may differ."""


@dataclass(frozen=True)
class Start:
    """Start an item now; reply with :meth:`Step.started`."""

    item: int


@dataclass(frozen=True)
class Call:
    """Send this roll call to all workers; the replies go to :meth:`Step.hear`."""

    roll_call: RollCall


@dataclass(frozen=True)
class Compare:
    """Send these flags to all workers, one per flagged item; the replies go to :meth:`Step.hear`."""

    flags: tuple[int, ...]


@dataclass(frozen=True)
class Tell:
    """Send all workers which parameters got a gradient here; the replies go to :meth:`Step.hear`."""

    used: tuple[bool, ...]


@dataclass(frozen=True)
class Completed:
    """An item has all its gradients; emitted only if the step is timed."""

    item: int


Action = Start | Call | Compare | Tell | Completed


@dataclass(frozen=True)
class Verdict:
    """What all workers together know about a step once all have begun it."""

    calls: tuple[RollCall, ...]
    flags: Mapping[int, tuple[int, ...]]
    """Flagged item to every worker's flags."""
    used: tuple[bool, ...]
    """By parameter: whether any worker uses it. Empty: all of them are used."""

    @property
    def is_unanimous(self) -> bool:
        """Whether all workers said the same, as they usually do."""
        return self.calls.count(self.calls[0]) == len(self.calls)

    @property
    def must_land(self) -> bool:
        """Whether some landing is collective, so that all workers must land everything now, in one order."""
        return bool(self.flags) and any(map(any, self.flags.values()))

    @property
    def active(self) -> int:
        """Number of workers that had input."""
        return sum(not call.is_joined for call in self.calls)

    @property
    def differing(self) -> tuple[int, ...]:
        """Workers whose parameters are not those of the first that compared any; a worker without input does not."""
        if self.is_unanimous:
            return ()
        compared = {rank: call.digest for rank, call in enumerate(self.calls) if call.digest and not call.is_joined}
        first = next(iter(compared.values()), 0)
        return tuple(rank for rank, digest in compared.items() if digest != first)

    def is_used(self, parameter: int) -> bool:
        """Return whether any worker uses a parameter in this step."""
        return self.used[parameter] if self.used else True


class Step:
    """One backward of a schedule, from its first gradient to its last landing.

    With a static graph, ``expected`` holds how often each parameter's gradient accumulates; None in the first step,
    which learns this and therefore starts nothing before it is closed. ``tells_used``: parameters may stay without a
    gradient, and the workers tell each other which do; ``kept`` are those with a gradient from ``no_sync()``.
    """

    def __init__(
        self,
        schedule: Schedule,
        call: RollCall,
        is_static: bool = False,
        expected: Sequence[int] | None = None,
        takes_times: bool = False,
        tells_used: bool = False,
        kept: Collection[int] = (),
    ) -> None:
        self.schedule = schedule
        self.call = call
        self.phase = Phase.OPEN
        self.error: BaseException | None = None
        self.additions: Counter[int] = Counter()
        """How often each parameter's gradient accumulated."""
        self.ready_order: list[int] = []
        """Units, in the order in which their gradients became final."""
        self.verdict: Verdict | None = None
        self._is_static = is_static
        self._expected = expected
        self._takes_times = takes_times
        self._tells_used = tells_used
        self._used = set(kept)
        """Parameters with a gradient on this worker."""
        model = schedule.model
        self._waiting = dict.fromkeys(range(len(model.parameters)))
        self._missing_of_unit = list(model.counts)
        self._missing_of_item = list(schedule.counts)
        self._next = dict.fromkeys(schedule.queues, 0)
        self._flags: dict[int, int] = {}
        self._unflagged = set(schedule.flagged)
        self._under_way: set[int] = set()
        self._landed: set[int] = set()

    @property
    def number(self) -> int:
        """The step's number, equal on all workers."""
        return self.call.step

    @property
    def under_way(self) -> frozenset[int]:
        """Items that have started but not landed."""
        return frozenset(self._under_way)

    @property
    def unfinished(self) -> Collection[int]:
        """Parameters whose gradient is not final yet."""
        return self._waiting.keys()

    # Events.

    def begin(self, unused: Collection[int] = ()) -> list[Action]:
        """Start the step; ``unused`` are parameters that get no gradient on this worker."""
        actions: list[Action] = [Call(self.call)]
        if self._expected is not None:
            unused = [parameter for parameter, count in enumerate(self._expected) if count == 0]
        for parameter in unused:
            actions += self._settle(parameter)
        return actions

    def gradient(self, parameter: int, is_used: bool = True) -> list[Action]:
        """Record an accumulation into a gradient; it is final unless a static graph expects more.

        Without ``is_used`` autograd reached the parameter, but with no gradient.
        """
        assert self.phase is Phase.OPEN, f"a gradient came while the step is {self.phase.value}"
        self.additions[parameter] = self.additions.get(parameter, 0) + 1
        if is_used:
            self._used.add(parameter)
        if self._is_static and (self._expected is None or self.additions[parameter] < self._expected[parameter]):
            return []
        if parameter not in self._waiting:
            raise self._twice(parameter)
        return self._settle(parameter)

    def close(self) -> tuple[list[Action], list[int]]:
        """End backward on this worker; return what starts now, and the parameters that fell short.

        Those received no gradient, or with a static graph fewer accumulations than in the first step.
        """
        assert self.phase is Phase.OPEN, f"a step was closed while it is {self.phase.value}"
        forgotten = [parameter for parameter in self._waiting if not self.additions[parameter]]
        # In order of arrival, while a static graph is still being learned.
        left = [*(parameter for parameter in self.additions if parameter in self._waiting), *forgotten]
        actions = [action for parameter in left for action in self._settle(parameter)]
        assert not any(self._missing_of_item), "an item was never complete"
        self.phase = Phase.CLOSED
        if self._expected is not None:
            return actions, [number for number, count in enumerate(self._expected) if self.additions[number] < count]
        return actions, forgotten

    def tell(self) -> list[Action]:
        """Return what the others must know of a closed step; after all starts, so that messages keep one order."""
        assert self.phase is Phase.CLOSED, f"a step told its end while it is {self.phase.value}"
        if not self._tells_used:
            return []
        return [Tell(tuple(number in self._used for number in range(len(self.schedule.model.parameters))))]

    def started(self, item: int, flags: int | None = 0) -> list[Action]:
        """Record that an item has started, with its flags; None: they follow (:meth:`flag`)."""
        assert item not in self._under_way, f"item {item} was started twice"
        assert item not in self._landed, f"item {item} was started again after it had landed"
        self._under_way.add(item)
        # Asked here, too: to call a function takes as long as to start a small item.
        return [] if flags is None or item not in self._unflagged else self.flag(item, flags)

    def flag(self, item: int, flags: int) -> list[Action]:
        """Record the flags of an item that has started.

        Those of the last flagged item trigger their comparison, long before the result is needed if they are known by
        then: at the end of backward a message would queue behind all the gradients still under way.
        """
        if item not in self._unflagged:
            return []
        self._flags[item] = flags
        self._unflagged.remove(item)
        if self._unflagged:
            return []
        return [Compare(tuple(self._flags[number] for number in self.schedule.flagged))]

    def hear(
        self,
        calls: Sequence[RollCall],
        flags: Sequence[Sequence[int]] = (),
        rank: int = 0,
        used: Sequence[Sequence[bool]] = (),
    ) -> Verdict:
        """Process every worker's roll call, flags and used parameters, by rank; items may land afterwards.

        Raises :class:`~poseidon.errors.MismatchError` if a worker is out of step; ``rank`` is this worker's.
        """
        assert self.phase is Phase.CLOSED, f"the others' calls came while the step is {self.phase.value}"
        for other, call in enumerate(calls):
            if call is not self.call:
                self.call.check(call, rank, other)
        by_item = dict(zip(self.schedule.flagged, map(tuple, zip(*flags, strict=True)), strict=True)) if flags else {}
        self.verdict = Verdict(tuple(calls), by_item, tuple(any(column) for column in zip(*used, strict=True)))
        self.phase = Phase.SETTLED if self.schedule.items else Phase.LANDED
        return self.verdict

    def land(self, item: int) -> None:
        """Record that an item has landed; the last one ends the step."""
        assert self.phase is Phase.SETTLED, f"item {item} landed while the step is {self.phase.value}"
        assert item not in self._landed, f"item {item} landed twice"
        assert item in self._under_way, f"item {item} landed but never started"
        self._under_way.remove(item)
        self._landed.add(item)
        if len(self._landed) == len(self.schedule.items):
            self.phase = Phase.LANDED

    def fail(self, error: BaseException) -> None:
        """Record that the step cannot finish; keeps the first error."""
        if self.phase is not Phase.BROKEN:
            self.phase, self.error = Phase.BROKEN, error

    # Inside.

    def _settle(self, parameter: int) -> list[Action]:
        """Mark a parameter's gradient as final; return what can start now."""
        if parameter not in self._waiting:
            return []
        del self._waiting[parameter]
        unit = self.schedule.model.unit_of[parameter]
        self._missing_of_unit[unit] -= 1
        if self._missing_of_unit[unit] == 0:
            self.ready_order.append(unit)
        item = self.schedule.item_of[parameter]
        self._missing_of_item[item] -= 1
        return self._complete(item) if self._missing_of_item[item] == 0 else []

    def _complete(self, item: int) -> list[Action]:
        actions: list[Action] = [Completed(item)] if self._takes_times else []
        name = self.schedule.queue_of.get(item)
        if name is None:
            return [*actions, Start(item)]
        queue = self.schedule.queues[name]
        while self._next[name] < len(queue) and self._missing_of_item[queue[self._next[name]]] == 0:
            actions.append(Start(queue[self._next[name]]))
            self._next[name] += 1
        return actions

    def _expected_of(self, parameter: int) -> int:
        return 0 if self._expected is None else self._expected[parameter]

    def _twice(self, parameter: int) -> UnsupportedError:
        name = self.schedule.model.parameters[parameter].name
        if self._is_static:
            return UnsupportedError(
                f"Your training graph has changed in this iteration: {name} got a gradient {self.additions[parameter]} "
                f"time(s) in step {self.number}, {self._expected_of(parameter)} in the first, but static_graph=True "
                "promises that every step does the same; remove static_graph"
            )
        return UnsupportedError(
            f"Expected to mark a variable ready only once. Parameter at index {parameter} with name {name}: its "
            "gradient was finished twice in one backward. Re-entrant activation checkpointing of shared layers does "
            "this (use checkpoint(..., use_reentrant=False), or pass static_graph=True if every step does the same), "
            "or a layer used outside forward() with find_unused_parameters (leave that out)"
        )
