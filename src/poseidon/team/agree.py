"""Checks on wrapping that all workers hold the same model, so that a difference is named instead of a hang."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from poseidon.errors import MismatchError
from poseidon.team.team import Team

Description = list[list[Any]]
"""Per tensor: name, shape, dtype, whether it is trained, memory order."""


def describe(named: Sequence[tuple[str, Tensor]]) -> Description:
    """Return plain data about tensors that is equal for equal models."""
    return [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad, list(tensor.stride())]
        for name, tensor in named
    ]


def check_same_model(team: Team, mine: Description) -> None:
    """Raise :class:`MismatchError` on every worker, naming the first difference, unless all models are the same."""
    digest = int.from_bytes(hashlib.sha256(json.dumps(mine).encode()).digest()[:7], "little")
    digests = [row[0] for row in team.gather_ints([digest], "all workers to wrap the same model")]
    if len(set(digests)) == 1:
        return
    everybody = team.gather_json(mine)
    for rank, theirs in enumerate(everybody):
        difference = first_difference(everybody[0], theirs, 0, rank)
        if difference is not None:
            raise MismatchError(f"the workers hold different models: {difference}")


def first_difference(ours: Description, theirs: Description, our_rank: int, their_rank: int) -> str | None:
    """Return the first difference between two descriptions in words, or None. Pure."""
    for left, right in zip(ours, theirs, strict=False):
        if left == right:
            continue
        if left[0] != right[0]:
            moved = any(right[0] == other[0] for other in ours)
            hint = "; the parameters are registered in different orders" if moved else ""
            return f"rank {our_rank} has {left[0]} where rank {their_rank} has {right[0]}{hint}"
        labels = ("shape", "dtype", "requires_grad", "memory order (stride)")
        for label, one, two in zip(labels, left[1:], right[1:], strict=True):
            if one != two:
                return f"{left[0]} has {label} {one} on rank {our_rank} and {two} on rank {their_rank}"
    if len(ours) != len(theirs):
        longer, rank = (ours, our_rank) if len(ours) > len(theirs) else (theirs, their_rank)
        fewer = min(len(ours), len(theirs))
        return (
            f"rank {our_rank} has {len(ours)} tensors, rank {their_rank} {len(theirs)}; the first only rank {rank} "
            f"has is {longer[fewer][0]}"
        )
    return None
