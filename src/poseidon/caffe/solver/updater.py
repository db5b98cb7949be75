"""From gradients to new parameters, in Caffe's order: clip, divide by iter_size, decay, apply the rule, subtract."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from poseidon.caffe.blob import Blob
from poseidon.caffe.learnable import LearnableParam
from poseidon.caffe.schema import SolverParameter
from poseidon.caffe.solver.rules import ParameterBatch, Rule
from poseidon.errors import unknown_name

log = logging.getLogger("poseidon.caffe")

_BLOCK = 1 << 17
"""Values that are updated at a time on a CPU: what a rule reads and writes of so many stays in a core's cache."""


class ParameterUpdater:
    """Updates a net's parameters by one rule and owns the rule's history.

    Parameters with ``lr_mult: 0`` do not change and cost nothing; their history stays zero.
    """

    def __init__(self, learnable: Sequence[LearnableParam], rule: Rule, param: SolverParameter) -> None:
        if param.regularization_type not in ("L1", "L2"):
            raise unknown_name("regularization_type", param.regularization_type, ("L1", "L2"))
        self._learnable = list(learnable)
        self._rule = rule
        self._param = param
        shapes = [entry.blob.shape for entry in self._learnable]
        self.history = [Blob(shape) for _ in range(rule.histories) for shape in shapes]
        """All first histories in the order of the parameters, then all second ones, as in the files."""
        self._groups: dict[tuple[float, float], list[int]] = {}
        for index, entry in enumerate(self._learnable):
            if entry.lr_mult:
                self._groups.setdefault((entry.lr_mult, entry.decay_mult), []).append(index)

    @torch.no_grad()
    def apply(self, rate: float, iteration: int) -> None:
        """Update all parameters by their gradients; afterwards every diff holds what was subtracted."""
        self._clip()
        for (lr_mult, decay_mult), members in self._groups.items():
            blobs = [self._learnable[i].blob for i in members]
            columns = [[blob.diff_tensor for blob in blobs], [blob.data_tensor for blob in blobs]]
            for diffs, data, *histories in blocks([*columns, *self._histories(members)]):
                if self._param.iter_size > 1:
                    torch._foreach_mul_(diffs, 1 / self._param.iter_size)
                self._decay(diffs, data, self._param.weight_decay * decay_mult)
                self._rule.apply(ParameterBatch(diffs, histories, rate * lr_mult, iteration))
                torch._foreach_sub_(data, diffs)

    def _histories(self, members: Sequence[int]) -> list[list[torch.Tensor]]:
        count = len(self._learnable)
        return [[self.history[slot * count + i].data_tensor for i in members] for slot in range(self._rule.histories)]

    def _clip(self) -> None:
        limit: float = self._param.clip_gradients
        diffs = [entry.blob.diff_tensor for entry in self._learnable if entry.blob.has_diff]
        if limit < 0 or not diffs:
            return
        norm = float(torch.stack(torch._foreach_norm(diffs)).norm())
        if norm > limit:
            scale = limit / norm
            log.info(
                "Gradient clipping: scaling down gradients (L2 norm %g > %g) by scale factor %g", norm, limit, scale
            )
            torch._foreach_mul_(diffs, scale)

    def _decay(self, diffs: list[torch.Tensor], data: list[torch.Tensor], decay: float) -> None:
        if not decay:
            return
        if self._param.regularization_type == "L2":
            torch._foreach_add_(diffs, data, alpha=decay)
        else:
            torch._foreach_add_(diffs, torch._foreach_sign(data), alpha=decay)


def blocks(columns: Sequence[list[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
    """Yield views of the columns' tensors, a block at a time; the columns have tensors of the same sizes.

    An update passes over its tensors several times. On a CPU the passes over a block find it in the cache; a GPU is
    fastest with everything at once.
    """
    if not columns[0] or columns[0][0].device.type != "cpu":
        yield list(columns)
        return
    waiting: list[list[torch.Tensor]] = []
    size = 0
    for row in zip(*columns, strict=True):
        if row[0].numel() > _BLOCK and all(tensor.is_contiguous() for tensor in row):
            for views in zip(*[tensor.view(-1).split(_BLOCK) for tensor in row], strict=True):
                yield [[view] for view in views]
            continue
        if size + row[0].numel() > _BLOCK and waiting:
            yield [list(column) for column in zip(*waiting, strict=True)]
            waiting, size = [], 0
        waiting.append(list(row))
        size += row[0].numel()
    if waiting:
        yield [list(column) for column in zip(*waiting, strict=True)]
