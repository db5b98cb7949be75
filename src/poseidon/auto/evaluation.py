"""Evaluation shared between workers: each computes a part of a batch's outputs, and all get all of them.

Outputs are exchanged instead of metrics, which cannot be found in a script: whatever the script computes from them is
what one worker would compute, and equal on all workers. A model is assumed to treat its samples independently once the
first shared outputs have equalled the full ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.auto.engines import Engines
from poseidon.auto.step import ScriptStep
from poseidon.engine.outputs import map_tensors, tensors_in
from poseidon.following.nesting import Nesting
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.team.tensors import list_tensors
from poseidon.team.verify import are_alike


class SharedEvaluation:
    """Makes calls of trained models in evaluation shared."""

    def __init__(
        self, team: Team, is_first_only: bool, engines: Engines, step: ScriptStep, report: ScriptReport
    ) -> None:
        self._team = team
        self._is_first_only = is_first_only
        self._engines = engines
        self._step = step
        self._report = report
        self._trusted: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._nesting = Nesting()

    def install(self, patches: Patches) -> None:
        """Install the hook."""
        patches.wrap(nn.Module, "__call__", self._call)

    def shares(self, count: int) -> list[int]:
        """Return how many of ``count`` samples each worker computes. Pure."""
        if self._is_first_only:
            return [count, *[0] * (self._team.size - 1)]
        return [
            (rank + 1) * count // self._team.size - rank * count // self._team.size for rank in range(self._team.size)
        ]

    def _call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._nesting.is_inside or torch.is_grad_enabled() or module.training or not self._step.is_shared:
            return original(module, *args, **kwargs)
        count = next((len(tensor) for tensor in tensors_in((args, kwargs)) if tensor.ndim), 0)
        if count < self._team.size or not self._is_trained(module):
            return original(module, *args, **kwargs)
        with self._nesting.enter():
            if module not in self._trusted:
                return self._try(original, module, args, kwargs, count)
            if self._trusted[module]:
                return self._share(original, module, args, kwargs, count)
            return original(module, *args, **kwargs)

    def _is_trained(self, module: nn.Module) -> bool:
        return any(module is root for owner in self._engines.living() for root in owner.roots())

    def _try(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, count: int) -> Any:
        full = original(module, *args, **kwargs)
        is_same = all(are_alike(self._team, tensors_in((args, kwargs))))
        if is_same:
            shared = self._share(original, module, args, kwargs, count)
            is_same = _agree(tensors_in(full), tensors_in(shared))
        verdicts = self._team.gather_ints([int(is_same)], "the trial of shared evaluation")
        self._trusted[module] = all(row[0] for row in verdicts)
        how = "computed by worker 0 for all" if self._is_first_only else "shared between the workers"
        answer = (
            how if self._trusted[module] else "cannot be shared (parts give other outputs); every worker computes all"
        )
        self._report.say(f"{type(module).__name__}: evaluation {answer}")
        return full

    def _share(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, count: int) -> Any:
        shares = self.shares(count)
        ends = list(accumulate(shares))
        start, size = ends[self._team.rank] - shares[self._team.rank], shares[self._team.rank]
        # A worker without samples still computes one, to learn the form of the outputs.
        part = slice(start, start + size) if size else slice(0, 1)

        def cut(tensor: Tensor) -> Tensor:
            return tensor[part] if tensor.ndim and len(tensor) == count else tensor

        outputs = original(module, *map_tensors(args, cut), **map_tensors(kwargs, cut))
        mine = part.stop - part.start
        return map_tensors(outputs, lambda output: self._gather(output, shares) if _has_rows(output, mine) else output)

    def _gather(self, mine: Tensor, shares: Sequence[int]) -> Tensor:
        padded = mine.new_zeros((max(shares), *mine.shape[1:]))
        size = shares[self._team.rank]
        padded[:size] = mine[:size]
        parts = list_tensors(self._team, padded, "the outputs in evaluation")
        return torch.cat([part[:share] for part, share in zip(parts, shares, strict=True)])


def _has_rows(output: Tensor, count: int) -> bool:
    return output.ndim > 0 and len(output) == count


def _agree(full: Sequence[Tensor], shared: Sequence[Tensor]) -> bool:
    def pairs() -> Iterator[bool]:
        for one, other in zip(full, shared, strict=False):
            is_close = one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-5)
            yield is_close

    return len(full) == len(shared) and all(pairs())
