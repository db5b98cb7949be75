"""What an order to step says (``served.py``): how to update pieces, with which gradients, and how they are clipped."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon.engine.aside import aside
from poseidon.engine.engine import Engine
from poseidon.engine.optimizers import check_unchanged, freeze_options, is_torchs_own, make_stand_in, step_groups
from poseidon.engine.replicas import sum_of_bits
from poseidon.routes.shard import Piece, Shard, State, check_state
from poseidon.sums.chunks import Chunk
from poseidon.team.team import Team


def make_update(
    optimizer: Optimizer,
    plain: type[Optimizer],
    options: Sequence[dict[str, Any]],
    group_of: Mapping[nn.Parameter, int],
) -> Callable[[Sequence[Piece], State], None]:
    """Return what steps pieces as the optimizer would step their parameters now, on any thread and at any time."""
    attributes = freeze_options(optimizer.__dict__)

    def update(pieces: Sequence[Piece], state: State) -> None:
        members: list[list[nn.Parameter]] = [[] for _ in options]
        for piece in pieces:
            if piece.parameter in group_of:
                members[group_of[piece.parameter]].append(piece.held)
        stand_in = make_stand_in(plain, {**attributes, "state": state})
        with aside():
            step_groups(stand_in, plain, options, members)
        check_unchanged(plain, attributes, stand_in.__dict__, "owners step parts of parameters")
        if not is_torchs_own(plain):
            check_state((piece.held, state[piece.held]) for piece in pieces if piece.held in state)

    return update


def gradients_in_hand(shard: Shard, lazy: Container[nn.Parameter]) -> dict[Piece, Tensor | None]:
    """Return the pieces of the gradients that the user may have changed: all but those of ``lazy`` parameters."""
    return {
        piece: None if piece.parameter.grad is None else piece.cut(piece.parameter.grad).clone()
        for piece in shard.pieces
        if piece.parameter not in lazy
    }


def with_own_gradients(engine: Engine) -> int:
    """Return the sum of the steps so far with what a backward without an exchange has added since the last one with it.

    Each owner takes its own worker's gradients. That is right if they are alike, as those of a penalty on the weights
    are; so the others compare.
    """
    own = [engine.parameters[number].grad for number in sorted(engine.local)]
    digest = sum_of_bits(gradient for gradient in own if gradient is not None)
    return crc32(b"%d %d" % (engine.taken, digest))


def sum_of_squares(means: Iterable[tuple[Chunk, Tensor]], shard: Shard, lazy: Container[nn.Parameter]) -> float:
    """Return this worker's part of the squared norm: of the means it owns, or what the user has in their place."""
    total = 0.0
    for chunk, mean in means:
        for piece in shard.pieces_of(chunk):
            gradient: Tensor | None = mean[piece.at : piece.at + piece.length]
            if piece.parameter not in lazy:
                gradient = None if piece.parameter.grad is None else piece.cut(piece.parameter.grad)
            if gradient is not None:
                total += float(gradient.double().square().sum())
    return total


def agree_on_clipping(
    team: Team, square: float, max_norm: float, scale: Tensor | None, is_double: bool = False
) -> Tensor:
    """Return what all workers multiply their gradients by, as ``clip_grad_norm_`` does, given parts. Collective.

    ``scale`` is what gradients still have to be divided by; ``is_double``: some gradient is in double precision.
    """
    word = torch.tensor(square, dtype=torch.float64, device="cpu").view(torch.int64).item()
    everybody = team.gather_ints([int(word)], "the norm of the gradients")
    squares = torch.tensor([row[0] for row in everybody], dtype=torch.int64, device="cpu").view(torch.float64)
    norm = squares.sum().sqrt().to(torch.float64 if is_double else torch.float32)
    if scale is not None:
        norm = norm / scale.to(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
