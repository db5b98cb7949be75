"""Local steps of several workers, computed by one process without any of Poseidon's code, to compare with.

Means are added in rank order and then divided, as the parameter server does it, so results can be compared bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Form:
    """A form of local steps."""

    every: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    """Of Nesterov."""
    fragments: Sequence[tuple[int, Sequence[str]]] = ()
    """At which step of a round each leaves, and the beginnings of its parameters' names; empty: all at the end."""
    overlap: int = 0
    mix: float = 0.0
    warmup: int = 0


def mean(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts)


@torch.no_grad()
def _outer_step(shared: Tensor, change: Tensor, form: Form, momenta: dict[str, Tensor], name: str) -> None:
    if form.outer_momentum:
        held = momenta[name] = momenta[name] * form.outer_momentum + change if name in momenta else change.clone()
        change = change.add(held, alpha=form.outer_momentum)
    shared.add_(change, alpha=-form.outer_lr)


def simulate(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor],
    form: Form,
    workers: int,
    steps: int,
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Train; return each worker's parameters and running statistics, and those that they share."""
    models = [copy.deepcopy(model) for _ in range(workers)]
    optimizers = [make_optimizer(one) for one in models]
    named = [dict(one.named_parameters()) for one in models]
    shared: dict[str, Tensor] = {name: p.detach().clone() for name, p in named[0].items()}
    stats = [{n: b for n, b in one.named_buffers() if b.is_floating_point()} for one in models]
    common = {name: buffer.clone() for name, buffer in stats[0].items()}
    fragments = form.fragments or [(form.every, [""])]
    momenta: dict[str, Tensor] = {}
    landing: dict[int, list[tuple[str, Tensor]]] = {}
    for step in range(1, steps + 1):
        for rank, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(one, rank, step).backward()
        if step <= form.warmup:
            for name in shared:
                average = mean([params[name].grad for params in named])
                for params in named:
                    params[name].grad = average.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step <= form.warmup:
            if step == form.warmup:
                shared = {name: p.detach().clone() for name, p in named[0].items()}
            continue
        local = step - form.warmup
        with torch.no_grad():
            for name, value in landing.pop(local, []) if form.overlap else []:
                _mix(named, name, value, form.mix)
            for place, beginnings in fragments:
                if (local - place) % form.every:
                    continue
                for name in [name for name in shared if name.startswith(tuple(beginnings))]:
                    change = mean([shared[name] - params[name].detach() for params in named])
                    _outer_step(shared[name], change, form, momenta, name)
                    if form.overlap:
                        landing.setdefault(local + form.overlap, []).append((name, shared[name].clone()))
                    else:
                        _mix(named, name, shared[name], 0.0)
                if place == form.every and not form.overlap:
                    _average_stats(common, stats)
    return [{name: p.detach().clone() for name, p in params.items()} for params in named], shared


def _mix(named: Sequence[Mapping[str, nn.Parameter]], name: str, value: Tensor, kept: float) -> None:
    for params in named:
        own = params[name].detach()
        own.mul_(kept).add_(value, alpha=1 - kept) if kept else own.copy_(value)


def _average_stats(common: dict[str, Tensor], stats: Sequence[Mapping[str, Tensor]]) -> None:
    for name, agreed in common.items():
        agreed -= mean([agreed - one[name] for one in stats])
        for one in stats:
            one[name].copy_(agreed)
