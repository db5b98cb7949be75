"""Gradients of any training loop, averaged over all workers before ``backward()`` returns.

Every optimizer gets an engine of its own (``poseidon.engine``), so that a loop may use several in any order. An engine
takes part in a backward if any of its parameters is about to get a gradient; autograd says which before the first one
arrives. What passes no engine is averaged in plain form: tensors of scripts without an optimizer at the end of
backward, gradients that a script put in place itself in ``optimizer.step()``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from poseidon.engine.assemble import assemble_engine
from poseidon.engine.engine import Options
from poseidon.engine.hooks import AutogradFrontEnd
from poseidon.launch.auto.averaging import are_alike, average_gradients, average_number, take_over
from poseidon.launch.auto.buffers import Buffers
from poseidon.launch.auto.leaves import find_leaves
from poseidon.launch.auto.owners import Holding, find_holding, find_roots, holding_tensors
from poseidon.launch.auto.patches import Patches
from poseidon.launch.auto.report import Report
from poseidon.launch.auto.streams import Streams
from poseidon.planning.cluster import Cluster
from poseidon.planning.planner import Plan
from poseidon.team.agree import check_same_model, describe
from poseidon.team.team import Team
from poseidon.team.verify import check_same_bits


@dataclass
class Step:
    """What the samples of the present step tell the exchange; the loaders write it."""

    weight: float = 1.0
    """Factor of this worker's loss: its samples in relation to an even share."""
    samples: int = 0
    """First dimension of the batch; 0 if it is not known."""
    values: int = 1
    """Numbers in the batch, which stand for its size."""
    is_shared: bool = False
    """Whether all workers were given this same batch."""
    has_dealt: bool = False
    """Whether any loader was dealt out so far."""


class AutoFrontEnd(AutogradFrontEnd):
    """Takes part in every backward that reaches one of its parameters, wherever that backward starts."""

    def __init__(self, engine: Any, holding: Holding) -> None:
        super().__init__(engine)
        self.holding = holding
        self.watch_outputs((), ())

    def begin(self) -> None:
        """Start the exchange, with what this backward will not reach left out."""
        if not self.engine.in_backward:
            unused = [parameter for parameter in self._nodes if not self.will_accumulate(parameter)]
            self.turns.begin_backward(unused)

    def finish(self) -> bool:
        """Complete the exchange if there was one."""
        if not self.engine.in_backward:
            return False
        self._end()
        return True

    def close(self) -> None:
        """Detach from the model and end the engine's threads."""
        super().close()
        self.engine.close()


@dataclass
class _Owner:
    """An optimizer, or the absence of one, and the engines of its parameters."""

    label: str
    parameters: Callable[[], list[Tensor]]
    front_ends: list[AutoFrontEnd] = field(default_factory=list)
    is_fresh: bool = False
    """Whether gradients were exchanged since the last step."""

    def strangers(self) -> list[Tensor]:
        """Return the trainable parameters that no engine knows."""
        known = {id(p) for front_end in self.front_ends for _, p in front_end.holding.named()}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in known]


class Gradients:
    """Watches optimizers and backwards of a script and keeps the workers' gradients alike."""

    def __init__(self, team: Team, step: Step, streams: Streams, report: Report, rate: float, factor: float) -> None:
        self._team = team
        self._step = step
        self._streams = streams
        self._report = report
        self._rate = rate
        """Factor for learning rates."""
        self._factor = factor
        """Factor for losses: 1 if they are means over samples, the number of workers if they are sums."""
        self._owners: weakref.WeakKeyDictionary[Optimizer, _Owner] = weakref.WeakKeyDictionary()
        self._order: list[tuple[weakref.ref[Optimizer] | None, _Owner]] = []
        self._unowned: _Owner | None = None
        self._pending: list[_Owner] = []
        self._buffers = Buffers(team)
        self._cluster: Cluster | None = None
        self._depth = 0
        self._has_averaged = False
        self._is_stepping = False
        self._waiting_for_forward: RemovableHandle | None = None
        self._roots: dict[int, list[nn.Module]] = {}

    def install(self, patches: Patches) -> None:
        """Put the hooks in place."""
        patches.wrap(Optimizer, "__init__", self._optimizer_made)
        patches.wrap(Optimizer, "add_param_group", self._group_added)
        patches.wrap(torch.autograd, "backward", self._backward)
        patches.wrap(torch.utils.checkpoint, "checkpoint", _checkpoint)
        patches.on_undo(register_optimizer_step_pre_hook(self._before_step).remove)
        patches.on_undo(self.close)

    @property
    def has_optimizer(self) -> bool:
        """Whether the script has made any optimizer."""
        return bool(self._order) and any(reference is not None for reference, _ in self._order)

    @property
    def roots(self) -> list[nn.Module]:
        """The outermost modules that are trained, as far as optimizers or backwards have told."""
        found: dict[int, nn.Module] = {}
        for owner in self._living():
            modules = [root for front_end in owner.front_ends for root in front_end.holding.roots]
            if not owner.front_ends:
                modules = self._roots.setdefault(id(owner), find_roots(owner.parameters()))
            found.update((id(module), module) for module in modules)
        return list(found.values())

    def verify(self) -> None:
        """Raise :class:`~poseidon.errors.MismatchError` unless all workers hold the same parameters. Collective."""
        if not self._has_averaged:
            self._report.say("nothing was averaged: no backward reached a parameter; each worker ran by itself")
        named = [
            pair for owner in self._living() for front_end in owner.front_ends for pair in front_end.holding.named()
        ]
        if named:
            check_same_bits(self._team, named)

    def close(self) -> None:
        """Give all models back as they were."""
        for _, owner in self._order:
            for front_end in owner.front_ends:
                front_end.close()
        self._order.clear()
        if self._waiting_for_forward is not None:
            self._waiting_for_forward.remove()

    # Optimizers.

    def _optimizer_made(self, original: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._adopt(optimizer)

    def _group_added(self, original: Callable[..., None], optimizer: Optimizer, group: dict[str, Any]) -> None:
        original(optimizer, group)
        if self._rate != 1.0 and "lr" in optimizer.param_groups[-1]:
            optimizer.param_groups[-1]["lr"] *= self._rate
        if optimizer in self._owners:
            self._expect(self._owners[optimizer])

    def _adopt(self, optimizer: Optimizer) -> _Owner:
        reference = weakref.ref(optimizer)

        def parameters() -> list[Tensor]:
            living = reference()
            groups = [] if living is None else living.param_groups
            return [parameter for group in groups for parameter in group["params"]]

        owner = _Owner(type(optimizer).__name__, parameters)
        self._owners[optimizer] = owner
        self._order.append((reference, owner))
        # At once, and once more before the first forward: a model may still change between the two.
        with self._aside():
            take_over(self._team, holding_tensors(owner.parameters(), find_roots(owner.parameters())))
        self._expect(owner)
        return owner

    def _expect(self, owner: _Owner) -> None:
        if owner not in self._pending:
            self._pending.append(owner)
        if self._waiting_for_forward is None:
            self._waiting_for_forward = register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._attach_pending()

    def _living(self) -> list[_Owner]:
        """Let go of what belonged to optimizers that are gone, and return the others in the order of their making."""
        gone = [owner for reference, owner in self._order if reference is not None and reference() is None]
        for owner in gone:
            for front_end in owner.front_ends:
                front_end.close()
            self._roots.pop(id(owner), None)
        self._order = [entry for entry in self._order if entry[1] not in gone]
        return [owner for _, owner in self._order]

    # Engines.

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Do something of our own in the middle of the script's forward without meeting its modes or its numbers."""
        with (
            self._streams.untouched(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else contextlib.nullcontext(),
            torch.device("cpu"),
        ):
            yield

    def _attach_pending(self) -> None:
        if self._waiting_for_forward is not None:
            self._waiting_for_forward.remove()
            self._waiting_for_forward = None
        living = self._living()
        pending, self._pending = [owner for owner in self._pending if owner in living], []
        taken = {id(p) for owner in living for front_end in owner.front_ends for _, p in front_end.holding.named()}
        for owner in pending:
            strangers = [p for p in owner.strangers() if id(p) not in taken]
            if strangers:
                with self._aside():
                    self._attach(owner, strangers)
                taken.update(id(p) for p in strangers)

    def _attach(self, owner: _Owner, parameters: Sequence[Tensor]) -> None:
        holding = find_holding(parameters)
        # Engines work at the same time, so each has channels of its own: nothing orders one's messages with another's.
        team = Team(dist.new_group(), self._team.timeout_s)
        check_same_model(team, describe(holding.named()))
        take_over(team, holding_tensors(holding.loose, holding.roots))
        device = parameters[0].device
        engine = assemble_engine(holding.units, team, device, Options(allow_unused=True), self._cluster)
        if self._cluster is None and engine.cluster.source == "measured":
            self._cluster = engine.cluster
        front_end = AutoFrontEnd(engine, holding)
        engine.arm(True, self._step.values)
        owner.front_ends.append(front_end)
        self._roots.pop(id(owner), None)
        self._report.say(
            f"{owner.label}: {holding.describe()}, taken from worker 0; gradients are averaged during backward"
        )

    # Backwards.

    def _backward(
        self, original: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **kw: Any
    ) -> None:
        if self._depth:
            original(tensors, grad_tensors, *args, **kw)
            return
        self._depth += 1
        try:
            outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if not self._step.has_dealt:
                self._report.say(
                    "no DataLoader is read for training: every worker goes through the script's own data; batches that "
                    "torch draws at random differ between workers, all others are the same on all of them"
                )
            self._streams.part()
            loose = self._before_backward([output for output in outputs if isinstance(output, Tensor)])
            original(tensors, self._weighted(outputs, grad_tensors), *args, **kw)
            self._after_backward(loose)
        finally:
            self._depth -= 1

    def _weighted(self, outputs: Sequence[Any], given: Any) -> Any:
        weight = self._step.weight * self._factor
        if weight == 1.0 or not all(isinstance(output, Tensor) for output in outputs):
            return given
        grads = list(given) if isinstance(given, Sequence) else [given] * len(outputs)
        return [
            torch.full_like(output, weight) if grad is None else grad * weight
            for output, grad in zip(outputs, grads, strict=True)
        ]

    def _before_backward(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Get the engines ready; return tensors to average at the end."""
        loose: list[Tensor] = []
        if not self.has_optimizer:
            loose = self._find_unowned(find_leaves(outputs))
        if self._pending:
            self._attach_pending()
        for owner in self._living():
            for front_end in owner.front_ends:
                front_end.engine.arm(True, self._step.values)
        return loose

    def _after_backward(self, loose: Sequence[Tensor]) -> None:
        owners = self._living()
        for owner in owners:
            for front_end in owner.front_ends:
                had_plan = front_end.engine.plan is not None
                owner.is_fresh |= front_end.finish()
                if front_end.engine.plan is not None and not had_plan:
                    self._report.say(f"{owner.label}: {_say_routes(front_end.engine.plan)}")
        average_gradients(self._team, loose)
        self._has_averaged |= bool(loose) or any(owner.is_fresh for owner in owners)
        self._buffers.take_over([root for owner in owners for fe in owner.front_ends for root in fe.holding.roots])

    def _find_unowned(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Sort out what a script without an optimizer trains: modules' parameters get an engine, tensors do not."""
        parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        if self._unowned is None and parameters:
            self._unowned = _Owner("no optimizer", list)
            self._order.append((None, self._unowned))
        if self._unowned is not None:
            known = self._unowned.parameters()
            new = [p for p in parameters if not any(p is other for other in known)]
            if new:
                everything = [*known, *new]
                self._unowned.parameters = lambda: everything
                self._expect(self._unowned)
        # A tensor of the batch's size is data (an image to be disturbed, say), not something that is trained.
        tensors = [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter) and not self._looks_like_data(leaf)]
        alike = are_alike(self._team, tensors)
        for tensor, is_alike in zip(tensors, alike, strict=True):
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            fate = (
                "gradients are averaged after backward" if is_alike else "differs between workers, so it is left alone"
            )
            self._report.say(f"tensor {shape}: {fate}")
        return [tensor for tensor, is_alike in zip(tensors, alike, strict=True) if is_alike]

    def _looks_like_data(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and tensor.shape[0] == self._step.samples

    # Steps.

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = self._owners.get(optimizer) or self._adopt(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            owner.is_fresh = False
            shared = self._shared(closure)
            return ((args[0], shared, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": shared})
        known = [] if owner.is_fresh else [p for p in owner.parameters() if p.requires_grad]
        late = known or [p for p in owner.strangers() if p.grad is not None and not self._is_taken(p)]
        if late:
            self._report.say(f"{owner.label}: gradients that did not come from backward() are averaged in step()")
            average_gradients(self._team, late)
            self._has_averaged = True
        owner.is_fresh = False
        return None

    def _is_taken(self, parameter: Tensor) -> bool:
        return any(
            parameter is p
            for owner in self._living()
            for front_end in owner.front_ends
            for _, p in front_end.holding.named()
        )

    def _shared(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Have a closure return the mean loss: a line search must see the same numbers on all workers."""

        def shared() -> Any:
            loss = closure()
            if loss is None:
                return None
            mean = average_number(self._team, float(loss), self._step.weight * self._factor)
            return torch.full_like(loss.detach(), mean) if isinstance(loss, Tensor) else mean

        return shared


def _say_routes(plan: Plan) -> str:
    counts = Counter(plan.routes.values())
    return "layers travel by " + ", ".join(f"{route} ({count})" for route, count in sorted(counts.items()))


def _checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Recompute activations in the form that does not hide parameters from the backward it happens in."""
    return original(*args, **{**kwargs, "use_reentrant": False})
