"""Plain means over all workers, for tensors that no engine handles."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.team.mirror import mirror_different
from poseidon.team.team import Team
from poseidon.team.tensors import sum_tensors


def average_gradients(team: Team, parameters: Sequence[Tensor], weight: float = 1.0) -> None:
    """Replace ``.grad`` of each parameter that has one on any worker by the weighted mean. Collective."""
    if not parameters:
        return
    has_gradient = [int(parameter.grad is not None) for parameter in parameters]
    rows = team.gather_ints(has_gradient, "the list of gradients")
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter, flags in zip(parameters, zip(*rows, strict=True), strict=True):
        if any(flags):
            groups[parameter.dtype, parameter.device].append(parameter)
    for members in groups.values():
        _average(team, members, weight)


@torch.no_grad()
def _average(team: Team, parameters: Sequence[Tensor], weight: float) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).mul_(weight / team.size)
    flat = sum_tensors(team, flat, "the mean of gradients")
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def average_number(team: Team, value: float, weight: float) -> float:
    """Return the weighted mean of all workers' numbers, bit-identical on all of them. Collective."""
    (word,) = struct.unpack("<q", struct.pack("<d", value * weight))
    rows = team.gather_ints([word], "the mean of the losses")
    return float(sum(struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in rows)) / team.size


def take_over(team: Team, tensors: Sequence[Tensor]) -> None:
    """Make the tensors equal to worker 0's; those that already are stay untouched. Collective."""
    # Write through .data: autograd must not see a changed version of tensors that a graph has saved.
    mirror_different(team, [tensor.data for tensor in tensors], 0, "the initial parameters")
