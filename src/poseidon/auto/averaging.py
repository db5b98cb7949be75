"""Plain means over all workers, for tensors that no engine handles."""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.team.mirror import mirror_all
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


def are_alike(team: Team, tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether it is equal on all workers, which pass the same number. Collective."""
    if not tensors:
        return []
    rows = team.gather_ints([_digest(tensor) for tensor in tensors], "the comparison of tensors")
    return [len(set(column)) == 1 for column in zip(*rows, strict=True)]


def take_over(team: Team, tensors: Sequence[Tensor]) -> None:
    """Make the tensors equal to worker 0's; those that already are stay untouched. Collective."""
    alike = are_alike(team, tensors)
    # Write through .data: autograd must not see a changed version of tensors that a graph has saved.
    different = [tensor.data for tensor, is_alike in zip(tensors, alike, strict=True) if not is_alike]
    mirror_all(team, different, 0, "the initial parameters")


def _digest(tensor: Tensor) -> int:
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return zlib.crc32(values.numpy().data, zlib.crc32(repr((tensor.shape, tensor.dtype)).encode()))
