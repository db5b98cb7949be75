"""Checks that all replicas are bit-identical, by comparing a checksum per tensor between workers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from poseidon.errors import MismatchError
from poseidon.team.team import Team


def check_same_bits(team: Team, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise :class:`MismatchError`, naming the first tensor and rank that differ, unless all agree. Collective."""
    flat = (tensor.detach().contiguous().flatten() for _, tensor in named)
    sums = [zlib.crc32(values.view(torch.uint8).cpu().numpy().data) for values in flat]
    everybody = team.gather_ints(sums, "the comparison of replicas")
    for rank, theirs in enumerate(everybody):
        for (name, _), left, right in zip(named, everybody[0], theirs, strict=True):
            if left != right:
                raise MismatchError(
                    f"replicas differ: {name} on rank {rank} ({team.watch.hosts[rank]}) is not what rank 0 "
                    f"({team.watch.hosts[0]}) has. Was it changed outside the optimizer, or on one worker only?"
                )
