"""The front ends of one optimizer's parameters: each watches backwards on behalf of an engine.

Collective calls come from ``engines.py``, at the same point of the script on all workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from poseidon.auto.accumulation import Group, State, state_of
from poseidon.auto.owners import Holding
from poseidon.engine.engine import Engine
from poseidon.engine.hooks import AutogradFrontEnd
from poseidon.engine.layers import restore
from poseidon.engine.rounds import LocalRounds
from poseidon.errors import UnsupportedError


class AutoFrontEnd(AutogradFrontEnd):
    """Takes part in every backward that reaches one of its parameters, wherever that backward starts."""

    def __init__(self, engine: Engine, holding: Holding, group: Group) -> None:
        super().__init__(engine)
        self.holding = holding
        self.group = group
        self._state: State = []
        """Of parameters and gradients, as the last backward of this step left them; empty if there was none."""
        self._seen: State = []
        """The same, or as what asks for gradients, such as a clipping function, left them since."""
        self.rounds: LocalRounds | None = None
        """With local steps: what exchanges the parameters."""
        self.watch_outputs((), ())

    def begin(self, early: Collection[nn.Parameter] = ()) -> None:
        """Start the exchange without the parameters that this backward does not reach."""
        if not self.engine.in_backward:
            unused = [parameter for parameter in self._nodes if not self.will_accumulate(parameter)]
            self.engine.expect_early(early)
            self.turns.begin_backward(unused)

    def prepare(self, values: int, label: str) -> bool:
        """Get ready for a backward; return whether gradients that somebody has changed forbid to leave any out.

        ``label`` names the optimizer, for the error if that shows too late.
        """
        group, is_found = self.group, False
        if not group.goes_each:
            now = self._look()
            if self._state and now != self._state:
                self._refuse_if_pending(label, "between two backwards of one step")
                is_found = group.changed()
            self._state = now
        self.engine.arm(group.begins(), values)
        return is_found

    def finish(self) -> bool:
        """Complete the exchange, if one began; return whether one did."""
        is_exchanged = self.engine.in_backward
        if is_exchanged:
            self._end()
        if not self.group.goes_each:
            now = self._look()
            if now != self._state:
                self.group.ended(is_exchanged)
            self._state = self._seen = now
        return is_exchanged

    def find_changes(self, label: str) -> bool:
        """Look at gradients before somebody asks for them; return whether changes forbid to leave any out from now on.

        A step that has another number of backwards exchanges its last ones only then: what is changed before, such as
        values that the script limits itself, would be each worker's own.
        """
        group = self.group
        if group.goes_each or not self._seen or self._look() == self._seen:
            return False
        self._refuse_if_pending(label, "before a step")
        return group.is_learning and group.changed()

    def settle(self) -> None:
        """Note that gradients are as they should be: who asked for them may have changed them."""
        if self._seen and not self.group.goes_each:
            self._seen = self._look()

    def flush(self, values: int) -> bool:
        """Exchange what backwards without an exchange have left, if anything; return whether it did. Collective."""
        if not self.group.is_pending:
            return False
        self.engine.arm(True, values)
        reached = {parameter: None for parameter in self._nodes if self.engine.is_local(parameter)}
        self.turns.begin_backward([parameter for parameter in self._nodes if parameter not in reached])
        self._report(reached)
        self._end()
        self.group.flushed()
        self._state, self._seen = [], []
        return True

    def _look(self) -> State:
        return state_of(self.engine.parameters, self.group.is_learning)

    def _refuse_if_pending(self, label: str, when: str) -> None:
        if self.group.is_pending:
            raise UnsupportedError(
                f"--accumulate: the script changed gradients, or parameters, of {label} {when}, when each worker had "
                "its own; it did not in its first steps. Run it without --accumulate"
            )

    def note_step(self) -> int:
        """Note that the optimizer has taken a step, or that a GradScaler has skipped it (:meth:`Group.stepped`)."""
        self._state, self._seen = [], []
        return self.group.stepped()

    def leave_layers_plain(self) -> None:
        """Run all layers as the user wrote them: an existing graph must be replayed exactly as it was recorded."""
        for unit in self.engine.units:
            restore(unit)

    def close(self) -> None:
        """Detach from the model and end the engine's threads."""
        super().close()
        if self.rounds is not None:
            self.rounds.close()
        self.engine.close()


@dataclass(eq=False)
class GradientOwner:
    """An optimizer, or the absence of one, and the engines of its parameters."""

    label: str
    parameters: Callable[[], list[Tensor]]
    optimizer: weakref.ref[Optimizer] | None = None
    front_ends: list[AutoFrontEnd] = field(default_factory=list)
    known: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    """The parameters that an engine of this or another owner already handles; another one may get a freed one's id."""
    borrowed: list[AutoFrontEnd] = field(default_factory=list)
    """Other owners' front ends that handle some of its parameters, too."""
    guessed_roots: Sequence[nn.Module] = ()
    """The outermost modules when the optimizer was created; used until an engine exists."""
    is_fresh: bool = False
    """Whether gradients were exchanged since the last step."""
    steps: int = 0
    """Steps so far."""

    @property
    def is_gone(self) -> bool:
        """Whether the optimizer was freed."""
        return self.optimizer is not None and self.optimizer() is None

    def learn(self, parameters: Iterable[Tensor]) -> None:
        """Note parameters that an engine handles."""
        for parameter in parameters:
            self.known[parameter] = None

    def borrow(self, others: Iterable[GradientOwner]) -> None:
        """Note which front ends of others handle some of its parameters."""
        mine = {id(parameter) for parameter in self.parameters()}
        self.borrowed = [
            front_end
            for other in others
            for front_end in (other.front_ends if other is not self else ())
            if any(id(parameter) in mine for parameter in front_end.engine.parameters)
        ]

    def strangers(self) -> list[Tensor]:
        """Return the trainable parameters that no engine handles yet."""
        return [p for p in self.parameters() if p.requires_grad and p not in self.known]

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the parameters of the engines, with their names."""
        return [pair for front_end in self.front_ends for pair in front_end.holding.named()]

    def roots(self) -> Sequence[nn.Module]:
        """Return the outermost modules of the parameters."""
        if self.front_ends:
            return [root for front_end in self.front_ends for root in front_end.holding.roots]
        return self.guessed_roots

    def close(self) -> None:
        """End the engines."""
        for front_end in self.front_ends:
            front_end.close()
        self.front_ends.clear()
