"""Gradients of any training loop, averaged over all workers before ``backward()`` returns.

Every optimizer has its own engine (``engines.py``), so a loop may use several in any order. An engine takes part in a
backward if any of its parameters will get a gradient; autograd knows which before the first arrives. Gradients that
pass no engine are averaged in full: tensors of scripts without an optimizer at the end of backward, gradients that a
script sets itself in ``optimizer.step()``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from poseidon.auto.averaging import average_gradients, average_number
from poseidon.auto.engines import Engines
from poseidon.auto.losses import SameLoss
from poseidon.auto.mixing import find_mixing
from poseidon.auto.owners import Elders
from poseidon.auto.reductions import read_terms
from poseidon.auto.step import ScriptStep
from poseidon.auto.usage import Usage
from poseidon.auto.weighing import Counts, describe, differ, mark, pack, scalings, weigh
from poseidon.engine.outputs import find_leaves
from poseidon.errors import ConfigError
from poseidon.following.nesting import Nesting
from poseidon.following.options import AutoOptions
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.following.streams import Streams
from poseidon.team.team import Team
from poseidon.team.verify import are_alike

_LOOKS = 20
"""How often to look where samples meet, in batches of one size: a term may join the loss later."""


class TorchGradients:
    """Hooks a script's optimizers and backward passes and keeps the workers' gradients equal."""

    def __init__(
        self,
        team: Team,
        engines: Engines,
        usage: Usage,
        step: ScriptStep,
        streams: Streams,
        report: ScriptReport,
        options: AutoOptions,
        same_loss: SameLoss | None = None,
    ) -> None:
        self._team = team
        self._engines = engines
        self._step = step
        self._streams = streams
        self._report = report
        self._usage = usage
        self._same_loss = same_loss
        self._is_local = options.local is not None
        self._is_total = options.batch == "total"
        self._reads_losses = self._is_total and options.loss == "auto"
        self._counts = {0: Counts()}
        """By the number of optimizers: another one is another training, whose numbers mean something else."""
        self._backwards = 0
        """How often hooks were looked for."""
        self._looked: Counter[tuple[int, int]] = Counter()
        """How often graphs were searched, by the number of losses and of samples."""
        self._loss_weight: float | None = None
        """Factor of the last loss, if it is not the step's."""
        self._is_same = False
        """Whether the last loss was of the same data on all workers."""
        self._rate = float(team.size) if options.scale_lr else 1.0
        """Factor for learning rates."""
        self._nesting = Nesting()
        """Around a backward: checkpoints run others inside it, which belong to it."""
        self._has_averaged = False
        self._elders = Elders()

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        patches.wrap(Optimizer, "__init__", self._optimizer_made)
        patches.wrap(Optimizer, "add_param_group", self._group_added)
        patches.wrap(torch.autograd, "backward", self._backward)
        patches.wrap(nn.Module, "_apply", self._moved)
        patches.wrap(torch.utils.checkpoint, "checkpoint", _checkpoint)
        for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_"):
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                if hasattr(module, name):
                    patches.wrap(module, name, self._flushed)
        patches.wrap(torch.amp.GradScaler, "unscale_", self._unscaled)
        patches.wrap(torch.amp.GradScaler, "step", self._scaled_step)
        patches.on_undo(register_optimizer_step_pre_hook(self._before_step).remove)
        self._usage.before_pass = self._look_at_leaves
        patches.on_undo(self._engines.close)

    def _moved(self, original: Callable[..., nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Note that a module may have got new memory, by which torch forgets who waits for its gradients."""
        moved = original(module, *args, **kwargs)
        if not self._step.is_forked:
            self._engines.watch_again()
        return moved

    def conclude(self, is_alone: bool = True) -> None:
        """Check that the workers hold the same parameters, and report if nothing was exchanged. Collective.

        ``is_alone``: nothing but PyTorch was trained.
        """
        if is_alone and not self._has_averaged:
            self._report.say("nothing was averaged: no backward reached a parameter; each worker ran by itself")
        self._engines.verify()

    def aside(self) -> AbstractContextManager[None]:
        """Return a context that ignores backward passes: another front end handles their gradients."""
        return self._nesting.enter()

    # Optimizers.

    def _optimizer_made(self, original: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if not (self._step.is_forked or self._engines.is_ours(optimizer)):
            self._engines.owner_of(optimizer)

    def _group_added(self, original: Callable[..., None], optimizer: Optimizer, group: dict[str, Any]) -> None:
        original(optimizer, group)
        if self._engines.is_ours(optimizer):
            return
        if self._rate != 1.0 and "lr" in optimizer.param_groups[-1]:
            optimizer.param_groups[-1]["lr"] *= self._rate

    def _flushed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Exchange what is pending before somebody looks at gradients."""
        if self._step.is_forked or self._nesting.is_inside:
            return original(*args, **kwargs)
        self._engines.flush()
        result = original(*args, **kwargs)
        self._engines.settle()
        return result

    def _unscaled(self, original: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kw: Any) -> Any:
        if not self._has_owner(optimizer):
            return original(scaler, optimizer, *args, **kw)
        self._engines.flush(optimizer)
        result = original(scaler, optimizer, *args, **kw)
        self._engines.settle(optimizer)
        return result

    def _scaled_step(
        self, original: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kw: Any
    ) -> Any:
        """Let a scaler look at exchanged gradients; it may skip the step, which then is one all the same."""
        if not self._has_owner(optimizer):
            return original(scaler, optimizer, *args, **kw)
        self._engines.flush(optimizer)
        result = original(scaler, optimizer, *args, **kw)
        self._engines.note_step(self._engines.owner_of(optimizer))
        return result

    def _has_owner(self, optimizer: Any) -> bool:
        is_known = isinstance(optimizer, Optimizer) and not self._engines.is_ours(optimizer)
        return is_known and not (self._step.is_forked or self._is_local)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._step.is_forked or self._engines.is_ours(optimizer):
            return None
        owner = self._engines.owner_of(optimizer)
        if not self._is_local:
            self._engines.flush(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            if self._is_local:
                raise ConfigError(
                    f"--local: {owner.label} evaluates the model several times in a step (a closure), and workers that "
                    "take steps of their own would search in different directions; run it without --local"
                )
            self._engines.exchange_each(owner)
            shared = self._shared(closure)
            return ((args[0], shared, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": shared})
        if not (owner.is_fresh or self._is_local):
            self._report.say(
                f"{owner.label}: gradients that did not come from backward() are averaged in step(), as means over "
                "samples (--loss sum takes them for sums)"
            )
            self._usage.begin_backward()
            average_gradients(self._team, [p for p in owner.parameters() if p.requires_grad], self._step.weight)
            self._has_averaged = True
        self._engines.count_step(owner)
        return None

    def _shared(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Make a closure return the mean loss: a line search must see the same numbers on all workers."""

        def shared() -> Any:
            loss = closure()
            if loss is None:
                return None
            weight = self._step.weight if self._loss_weight is None else self._loss_weight
            mean = average_number(self._team, float(loss), weight)
            return torch.full_like(loss.detach(), mean) if isinstance(loss, Tensor) else mean

        return shared

    # Backwards.

    def _backward(
        self, original: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **kw: Any
    ) -> None:
        if self._step.is_forked:
            self._report.say(
                "a process that the script started trains by itself, on every worker: nothing of it is shared"
            )
        if self._nesting.is_inside or self._step.is_forked:
            original(tensors, grad_tensors, *args, **kw)
            return
        with self._nesting.enter():
            outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            loose = self._before_backward([output for output in outputs if isinstance(output, Tensor)])
            scaled = self._scale_terms(outputs)
            try:
                original(tensors, self._weighted(outputs, grad_tensors), *args, **kw)
            finally:
                for handle in scaled:
                    handle.remove()
            self._has_averaged |= self._engines.end_backward()
            average_gradients(self._team, loose)
            self._has_averaged |= bool(loose)

    def _before_backward(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Prepare the engines; return tensors to average at the end."""
        self._usage.begin_backward()
        if self._same_loss is not None:
            self._same_loss.begin_backward(outputs)
        self._say_what_is_not_divided()
        # Loaders part the workers' noise. Without one, noise gives each worker its own batches, if they may differ.
        if not self._step.has_dealt and not self._is_total:
            self._streams.part()
        loose = [] if self._engines.has_optimizer else self._find_unowned(find_leaves(outputs))
        self._engines.begin_backward()
        self._say_what_hooks_see()
        return loose

    def _say_what_hooks_see(self) -> None:
        """Say which parameters have hooks that see a worker's own gradient: the mean of what they make is another."""
        if self._backwards > _LOOKS or self._team.size == 1:
            return
        self._backwards += 1
        for owner in self._engines.living():
            for name, parameter in owner.named():
                if parameter._backward_hooks:
                    self._report.say(
                        f"a hook on the gradient of {name} sees each worker's own gradient, before the mean: what it "
                        "changes there is not what one machine computes"
                    )
                    return

    def _say_what_is_not_divided(self) -> None:
        if self._step.has_dealt or self._usage.has_trained:
            return
        same = "every worker computes the same steps"
        if self._step.is_shared:
            self._report.say(
                f"nothing is shared: training on batches that every worker has as a whole saves no work; {same}"
            )
        elif self._is_total:
            self._report.say(
                f"nothing is shared, as no DataLoader is read for training: --batch total divides nothing, {same}"
            )
        else:
            self._report.say(
                "nothing is shared, as no DataLoader is read for training: every worker goes through the script's own "
                "data; batches that torch draws at random differ between workers, all others are the same on all"
            )

    def _scale_terms(self, outputs: Sequence[Any]) -> list[RemovableHandle]:
        """Scale the terms of a loss that are not means over samples. Collective, if a batch was divided."""
        self._loss_weight, self._is_same = None, False
        portion = self._step.portion
        if portion is None or not self._is_total:
            return []
        losses = [output for output in outputs if isinstance(output, Tensor)]
        self._say_what_mixes(losses, portion.samples)
        if not self._reads_losses:
            return []
        terms = read_terms(losses, portion.samples, portion.total)
        own = 0 if self._usage.is_recognised or not self._has_averaged else mark(losses, terms)
        told = self._team.gather_ints([*pack(terms, portion.real), own], "what the loss is a mean over")
        rows, marks = [row[:-1] for row in told], [row[-1] for row in told]
        # Of a batch of one sample each worker has copies, so that losses are the same anyway.
        if all(marks) and len(set(marks)) == 1 and portion.total > 1:
            self._report.say(
                "a loss is the same on all workers, of data that the script has beside its loaders: it is not divided"
            )
            self._loss_weight, self._is_same = 1.0, True
            return []
        if not all(term.nodes for term in terms) or not terms:
            self._report.say(
                "what a loss, or a part of one, is a mean over cannot be read from its graph (compiled, or no single "
                "number): it counts as a mean over samples (--loss sum takes all losses for sums)"
            )
        if differ(rows):
            self._report.say(
                "a loss has other terms on one worker than on another (one for each class or time step that its part "
                "has, say): what each is a mean over cannot be compared, so --batch total is not exact here"
            )
        if self._engines.adopted not in self._counts:
            self._counts = {self._engines.adopted: Counts()}
        factors = weigh(terms, rows, portion, self._counts[self._engines.adopted])
        if factors and len(set(factors)) == 1:
            self._loss_weight = factors[0]
        for term, factor in zip(terms, factors, strict=True):
            if factor != self._step.weight:
                self._report.say(describe(term, factor, portion))
        nodes, disagrees = scalings(terms, factors)
        if disagrees:
            self._report.say(
                "a loss has a part that counts twice, by different numbers of samples or targets (a sum and a mean "
                "with one learned weight, say), so --batch total is not exact here"
            )
        weight = self._step.weight
        scaled = {node: factor / weight for node, factor in nodes.items() if weight and factor != weight}
        return [node.register_prehook(_scaling(factor)) for node, factor in scaled.items()]

    def _say_what_mixes(self, losses: Sequence[Tensor], samples: int) -> None:
        """Say where samples meet, so that no weights make the parts of a batch what the whole is."""
        key = (len(losses), samples)
        self._looked[key] += 1
        if self._looked[key] > _LOOKS:
            return
        for loss in losses:
            for finding in find_mixing(loss, samples):
                self._report.say(
                    f"{finding}: with a batch divided between workers this is not what one machine computes, so "
                    "--batch total is not exact here"
                )

    def _weighted(self, outputs: Sequence[Any], given: Any) -> Any:
        weight = 1.0 if self._is_same else self._step.weight
        if weight == 1.0 or not all(isinstance(output, Tensor) for output in outputs):
            return given
        grads = list(given) if isinstance(given, Sequence) else [given] * len(outputs)
        return [_scaled(output, grad, weight) for output, grad in zip(outputs, grads, strict=True)]

    def _find_unowned(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Split what a script without an optimizer trains: modules' parameters get an engine, loose tensors do not."""
        self._engines.train_without_optimizer([leaf for leaf in leaves if isinstance(leaf, nn.Parameter)])
        # A tensor of the batch's size is data (e.g. an image to perturb), not a trained parameter.
        tensors = [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter) and not self._looks_like_data(leaf)]
        alike = are_alike(self._team, tensors)
        for tensor, is_alike in zip(tensors, alike, strict=True):
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            fate = "gradients are averaged after backward" if is_alike else "differs between workers, left alone"
            self._report.say(f"tensor {shape}: {fate}")
        return [tensor for tensor, is_alike in zip(tensors, alike, strict=True) if is_alike]

    def _looks_like_data(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and tensor.shape[0] == self._step.samples and tensor not in self._elders

    def _look_at_leaves(self) -> None:
        if not (self._step.is_forked or self._engines.has_optimizer):
            self._elders.look()


def _scaling(factor: float) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
    def scale(gradient: Tensor) -> Tensor:
        # A part without any target divides by none; its gradient is then no number, and counts nothing.
        return gradient * factor if factor else torch.zeros_like(gradient)

    return lambda gradients: tuple(None if gradient is None else scale(gradient) for gradient in gradients)


def _scaled(output: Tensor, grad: Tensor | None, weight: float) -> Tensor | None:
    if grad is not None:
        return grad * weight
    # Otherwise leave it to torch, which reports what is wrong with it.
    return torch.full_like(output, weight) if output.numel() == 1 else None


def _checkpoint(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Use the checkpointing that does not hide parameters from the backward in which it runs."""
    return original(*args, **{**kwargs, "use_reentrant": False})
