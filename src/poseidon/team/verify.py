"""Tells whether workers hold the same bits, by comparing a digest per tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from poseidon.errors import MismatchError
from poseidon.team.team import Team
from poseidon.team.tensors import in_a_row


def are_alike(team: Team, tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether it is equal on all workers, which pass the same number. Collective."""
    if not tensors:
        return []
    rows = team.gather_ints([_digest(tensor) for tensor in tensors], "the comparison of tensors")
    return [len(set(column)) == 1 for column in zip(*rows, strict=True)]


def _digest(tensor: Tensor) -> int:
    """Return 56 bits of a cryptographic hash: tensors that look alike are not copied, so chance must not decide."""
    values = in_a_row(tensor.detach().cpu()).view(torch.uint8)
    hashed = hashlib.sha256(repr((tuple(tensor.shape), tensor.dtype)).encode())
    hashed.update(values.numpy().data)
    return int.from_bytes(hashed.digest()[:7], "little")


def find_differences(
    team: Team, named: Sequence[tuple[str, Tensor]], members: Sequence[int] | None = None
) -> dict[str, list[int]]:
    """Return the tensors that differ, each with the workers that do not hold what the first one holds. Collective.

    Only ``members`` (ranks; default all) are compared.
    """
    everybody = team.gather_ints([_digest(tensor) for _, tensor in named], "the comparison of replicas")
    ranks = range(len(everybody)) if members is None else members
    found = {
        name: [rank for rank in ranks if everybody[rank][place] != everybody[ranks[0]][place]]
        for place, (name, _) in enumerate(named)
    }
    return {name: odd for name, odd in found.items() if odd}


def difference_text(team: Team, odd: Mapping[str, Sequence[int]], ranks: Sequence[int], step: int | None) -> str:
    """Return the message for replicas that differ: who, what, what to do."""
    ranks = sorted({rank for some in odd.values() for rank in some} or ranks)
    first = next(rank for rank in range(len(team.watch.hosts)) if rank not in ranks)
    who = ", ".join(f"{rank} ({team.watch.hosts[rank]})" for rank in ranks)
    some = ", ".join([*odd][:5]) + (f" and {len(odd) - 5} more" if len(odd) > 5 else "")
    when = "" if step is None else f", seen in backward {step}"
    return (
        f"replicas differ{when}: {some or 'some parameters'} on rank {who} is not what rank {first} "
        f"({team.watch.hosts[first]}) has. Was it changed or loaded on one worker only, or outside the optimizer (as "
        "an embedding with max_norm does with the rows that it looks up)? Does the optimizer's own state differ (a "
        "checkpoint loaded in part, momentum after join())? Load parameters and optimizer from one checkpoint on all "
        "workers. What differs on purpose belongs into _set_params_and_buffers_to_ignore_for_model(); "
        "POSEIDON_CHECK_REPLICAS=0 ends the check during training"
    )


def check_same_bits(team: Team, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise :class:`MismatchError`, naming the tensors and ranks that differ, unless all agree. Collective."""
    odd = find_differences(team, named)
    if odd:
        raise MismatchError(difference_text(team, odd, (), None))
