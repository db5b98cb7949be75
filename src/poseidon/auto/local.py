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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

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
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The modules in these that have parameters which are exchanged."""
        self._counted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Steps of those that have rounds."""
        self._begun: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """By optimizer in a step: what was counted before it."""
        self._outers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._is_making = False
        self._unshared: dict[Optimizer, None] = {}
        """Those that have stepped since all workers last held the same, in order. Held, because a script may drop its
        optimizer before it uses the model; and one in a cycle of references is not freed everywhere at once."""
        self._loads: list[Loads] = []

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        patches.on_undo(register_optimizer_step_pre_hook(self._stepping).remove)
        patches.on_undo(register_optimizer_step_post_hook(self._stepped).remove)
        patches.on_undo(register_module_forward_pre_hook(self._before_forward).remove)
        patches.wrap(nn.Module, "state_dict", self._taken)
        patches.wrap(nn.Module, "__reduce_ex__", self._taken)  # copies, and files of a whole model
        patches.wrap(torch.amp.GradScaler, "step", self._scaled_step)
        patches.on_undo(self.close)

    def owns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is not the script's, but steps what the workers share."""
        return self._is_making or optimizer in self._outers

    def attach(self, optimizer: Optimizer, engine: Engine, holding: Holding) -> LocalRounds:
        """Begin rounds for parameters that an optimizer steps, and return them for whoever closes them. Collective."""
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
        exchanged = {id(parameter) for unit in holding.units for parameter in unit.parameters}
        for root in holding.roots:
            self._parts.update(
                part for part in root.modules() if any(id(parameter) in exchanged for parameter in part.parameters())
            )
        for root in fresh:
            self._loads.append(Loads(root))
        plan = make_local_plan([unit.spec for unit in holding.units], engine.cluster, self._schedule)
        self._report.say(f"{type(optimizer).__name__}: {str(plan).splitlines()[0]} ({self._outer})")
        return rounds

    def synchronize(self) -> None:
        """Let all workers hold the same parameters. Collective."""
        self._take_loaded()
        unshared, self._unshared = list(self._unshared), {}
        for optimizer in unshared:
            for each in self._rounds.get(optimizer, ()):
                each.synchronize()

    def close(self) -> None:
        """Stop exchanging."""
        for rounds in list(self._rounds.values()):
            for each in rounds:
                each.close()
        self._rounds.clear()
        self._unshared.clear()

    def _sharing(self, optimizer: Optimizer) -> Optimizer | None:
        """Return the optimizer that has the rounds of the parameters: this one, or another one that has them, too."""
        if optimizer in self._rounds or optimizer in self._outers:
            return None if optimizer in self._outers else optimizer
        mine = _parameters_of(optimizer)
        return next((other for other in list(self._rounds) if not mine.isdisjoint(_parameters_of(other))), None)

    def _stepping(self, optimizer: Optimizer, *_: Any) -> None:
        sharing = self._sharing(optimizer)
        if sharing is not None:
            self._begun[optimizer] = self._counted.get(sharing, 0)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        sharing = self._sharing(optimizer)
        # One around another lets that one step, which has been counted.
        if sharing is not None and self._begun.pop(optimizer, 0) == self._counted.get(sharing, 0):
            self._count(sharing)

    def _count(self, optimizer: Optimizer) -> None:
        self._counted[optimizer] = self._counted.get(optimizer, 0) + 1
        for rounds in self._rounds[optimizer]:
            rounds.step()
            self._unshared[optimizer] = None

    def _scaled_step(
        self, original: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kw: Any
    ) -> Any:
        """Count a step that a scaler skips: workers would otherwise exchange after different ones."""
        sharing = self._sharing(optimizer)
        before = 0 if sharing is None else self._counted.get(sharing, 0)
        result = original(scaler, optimizer, *args, **kw)
        if sharing is not None and self._counted.get(sharing, 0) == before:
            self._count(sharing)
        return result

    def _before_forward(self, module: nn.Module, *_: Any) -> None:
        # Asked in this order: a graph that is being made must see nothing of it, and training comes most often.
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled():
            if any(each.is_due for each in self._loads):
                self._take_loaded()
            return
        module = getattr(module, "_orig_mod", module)
        # In training, parts are used without gradients by checkpointing, in the middle of a forward.
        if self._unshared and (module in self._roots or (not module.training and module in self._parts)):
            self._report.say("the workers exchange parameters before the model is used without gradients")
            self.synchronize()

    def _taken(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kw: Any) -> Any:
        # Not a hook of the module: its copies and files would have it, and all that belongs to it.
        if self._unshared and (module in self._roots or module in self._parts):
            self.synchronize()
        return original(module, *args, **kw)

    def _take_loaded(self) -> None:
        """Agree on what the script has loaded, which is no progress for an outer optimizer."""
        loaded = set().union(*(each.take() for each in self._loads if each.is_due))
        for rounds in list(self._rounds.values()) if loaded else ():
            for each in rounds:
                each.take_loaded(loaded)


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
