"""Buffers such as running averages: all workers take worker 0's, as in torch's DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from poseidon.team.mirror import mirror_all
from poseidon.team.team import Team


class Buffers:
    """Tracks which modules' buffers have changed since they were last synchronised."""

    def __init__(self, team: Team) -> None:
        self._team = team
        # Keep the tensors themselves, not their ids: no new tensor can then be mistaken for an old one.
        self._last: weakref.WeakKeyDictionary[nn.Module, list[tuple[Tensor, int]]] = weakref.WeakKeyDictionary()

    def take_over(self, roots: Iterable[nn.Module]) -> None:
        """Copy worker 0's buffers of modules where any may have changed, so not constant masks. Collective."""
        changed: dict[nn.Module, None] = {}
        for root in roots:
            for module in root.modules():
                if module._buffers and module not in changed and self._has_changed(module):
                    changed[module] = None
        tensors = {id(buffer): buffer for module in changed for buffer in _buffers_of(module)}
        mirror_all(self._team, list(tensors.values()), 0, "the buffers")
        for module in changed:
            self._last[module] = [(buffer, buffer._version) for buffer in _buffers_of(module)]

    def _has_changed(self, module: nn.Module) -> bool:
        if isinstance(module, _NormBase) and module.training:
            return True  # its kernels update running averages without bumping the version
        before = self._last.get(module)
        now = _buffers_of(module)
        if before is None or len(before) != len(now):
            return True
        pairs = zip(before, now, strict=True)
        return any(buffer is not old or buffer._version != version for (old, version), buffer in pairs)


def _buffers_of(module: nn.Module) -> list[Tensor]:
    return [buffer for buffer in module._buffers.values() if buffer is not None]
