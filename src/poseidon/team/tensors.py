"""Tensors as rows; sums and lists of all workers' tensors, blocking, for the rare ones that no route carries.

Sums and lists go by NCCL if it serves their device, else over the wire.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.team.team import Team

WHOLE_BYTES = 64 << 10
"""Up to this size everybody sends everything to everybody: one leg instead of two."""


def in_a_row(tensor: Tensor) -> Tensor:
    """Return a tensor's values in order and side by side, as bytes are read; without a copy where they lie so."""
    plain = tensor.detach().contiguous()
    # A single value counts as contiguous with any stride (``x[::4]`` of four), but torch views no other type in it.
    return plain.as_strided((plain.numel(),), (1,))


def sum_tensors(team: Team, mine: Tensor, what: str) -> Tensor:
    """Return the sum of all workers' tensors, which have one shape; equal on all to the last bit. Collective."""
    if mine.is_cuda and team.is_nccl:
        total = mine.clone()
        team.wait_for(dist.all_reduce(total, group=team.group, async_op=True), total, what)
        return total
    host = in_a_row(mine.detach().cpu())
    if team.size <= 2 or host.nbytes <= WHOLE_BYTES:
        total = _add([_as_tensor(part, host) for part in team.exchange(_bytes_of(host), what)])
    else:
        # Each worker adds one share, so that no link carries more than about twice the tensor.
        share = -(-host.numel() // team.size)
        padded = host.new_zeros(share * team.size)
        padded[: host.numel()] = host
        parts = team.exchange_shares(_bytes_of(padded), what)
        own = _add([_as_tensor(part, host) for part in parts])
        total = torch.cat([_as_tensor(part, host) for part in team.exchange(_bytes_of(own), what)])[: host.numel()]
    return total.view(mine.shape).to(mine.device)


def list_tensors(team: Team, mine: Tensor, what: str) -> list[Tensor]:
    """Return all workers' tensors, which have one shape, by rank. Collective."""
    if mine.is_cuda and team.is_nccl:
        parts = [torch.empty_like(mine) for _ in range(team.size)]
        team.wait_for(dist.all_gather(parts, mine.contiguous(), group=team.group, async_op=True), mine, what)
        return parts
    host = in_a_row(mine.detach().cpu())
    sent = team.exchange(_bytes_of(host), what)
    return [_as_tensor(part, host).view(mine.shape).to(mine.device) for part in sent]


def _bytes_of(flat: Tensor) -> memoryview:
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def _as_tensor(part: bytearray, like: Tensor) -> Tensor:
    return torch.frombuffer(part, dtype=like.dtype) if part else like.new_empty(0)


def _add(parts: list[Tensor]) -> Tensor:
    """Return the sum, added in rank order by everyone."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
