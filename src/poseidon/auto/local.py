"""``--local H``: an unmodified script takes local steps, and its workers exchange parameters every H steps.

Every optimizer has rounds of its own (``engine/rounds.py``). All workers run the same script, so whatever it does with
a model as a whole, it does at the same point everywhere: before an evaluation, and before ``state_dict()``, the workers
exchange what is left of a round, so that decisions and files come from one model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from poseidon.auto.owners import Holding
from poseidon.engine.engine import Engine
from poseidon.engine.loads import Loads
from poseidon.engine.local import averaged_buffers, open_rounds
from poseidon.engine.rounds import LocalRounds
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.planning.local import LocalSchedule, make_local_plan


class LocalSteps:
    """The rounds of all optimizers of a script."""

    def __init__(self, every: int, outer: str, report: ScriptReport) -> None:
        self._schedule = LocalSchedule(every)
        self._outer = outer
        self._report = report
        self._rounds: weakref.WeakKeyDictionary[Optimizer, list[LocalRounds]] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._counted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._outers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._is_making = False
        self._has_stepped = False
        """Since the last time that all workers held the same."""
        self._loads: list[Loads] = []

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        patches.on_undo(register_optimizer_step_post_hook(self._stepped).remove)
        patches.on_undo(register_module_forward_pre_hook(self._before_forward).remove)
        patches.wrap(torch.amp.GradScaler, "step", self._scaled_step)
        patches.on_undo(self.close)

    def owns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is not the script's, but steps what the workers share."""
        return self._is_making or optimizer in self._outers

    def attach(self, optimizer: Optimizer, engine: Engine, holding: Holding) -> None:
        """Begin rounds for parameters that an optimizer steps. Collective."""
        fresh = [root for root in holding.roots if root not in self._roots]
        buffers = {
            f"{number}.{name}": read
            for number, root in enumerate(fresh)
            for name, read in averaged_buffers(root).items()
        }
        self._is_making = True
        try:
            rounds = open_rounds(engine, holding.units, buffers, self._schedule, self._outer)
        finally:
            self._is_making = False
        self._outers.add(rounds.outer)
        self._rounds.setdefault(optimizer, []).append(rounds)
        self._roots.update(fresh)
        for root in fresh:
            root.register_state_dict_pre_hook(self._before_state)
            self._loads.append(Loads(root))
        plan = make_local_plan([unit.spec for unit in holding.units], engine.cluster, self._schedule)
        self._report.say(f"{type(optimizer).__name__}: {str(plan).splitlines()[0]} ({self._outer})")

    def synchronize(self) -> None:
        """Let all workers hold the same parameters. Collective."""
        self._take_loaded()
        if self._has_stepped:
            self._has_stepped = False
            for rounds in list(self._rounds.values()):
                for each in rounds:
                    each.synchronize()

    def close(self) -> None:
        """Stop exchanging."""
        for rounds in list(self._rounds.values()):
            for each in rounds:
                each.close()
        self._rounds.clear()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._outers:
            return
        self._counted[optimizer] = self._counted.get(optimizer, 0) + 1
        for rounds in self._rounds.get(optimizer, ()):
            rounds.step()
            self._has_stepped = True

    def _scaled_step(
        self, original: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kw: Any
    ) -> Any:
        """Count a step that a scaler skips: workers would otherwise exchange after different ones."""
        before = self._counted.get(optimizer, 0)
        result = original(scaler, optimizer, *args, **kw)
        if self._counted.get(optimizer, 0) == before:
            self._stepped(optimizer)
        return result

    def _before_forward(self, module: nn.Module, *_: Any) -> None:
        # Asked in this order: a graph that is being made must see nothing of it, and training comes most often.
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled():
            if any(each.is_due for each in self._loads):
                self._take_loaded()
            return
        if self._has_stepped and getattr(module, "_orig_mod", module) in self._roots:
            self._report.say("the workers exchange parameters before the model is used without gradients")
            self.synchronize()

    def _before_state(self, *_: Any) -> None:
        self.synchronize()

    def _take_loaded(self) -> None:
        """Agree on what the script has loaded, which is no progress for an outer optimizer."""
        loaded = set().union(*(each.take() for each in self._loads if each.is_due))
        for rounds in list(self._rounds.values()) if loaded else ():
            for each in rounds:
                each.take_loaded(loaded)
