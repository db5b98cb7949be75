"""Buffers such as running averages: all workers take worker 0's, as in torch's DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from poseidon.following.script_report import ScriptReport
from poseidon.team.mirror import mirror_all
from poseidon.team.team import Team
from poseidon.team.verify import are_alike

_LOOKS = 20
"""How often to look whether workers have filled a module's buffers with different values."""


class Buffers:
    """Tracks which modules' buffers have changed since they were last synchronised."""

    def __init__(self, team: Team, report: ScriptReport) -> None:
        self._team = team
        self._report = report
        self._looked: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        # Keep the tensors themselves, not their ids: no new tensor can then be mistaken for an old one.
        self._last: weakref.WeakKeyDictionary[nn.Module, list[tuple[Tensor, int]]] = weakref.WeakKeyDictionary()

    def take_over(self, roots: Iterable[nn.Module]) -> None:
        """Copy worker 0's buffers of modules where any may have changed, so not constant masks. Collective."""
        changed: dict[nn.Module, None] = {}
        for root in roots:
            for module in root.modules():
                if module._buffers and module not in changed and self._has_changed(module):
                    changed[module] = None
        self._say_what_differs(list(changed))
        tensors = {id(buffer): buffer for module in changed for buffer in _buffers_of(module)}
        mirror_all(self._team, list(tensors.values()), 0, "the buffers")
        for module in changed:
            self._last[module] = [(buffer, buffer._version) for buffer in _buffers_of(module)]

    def _say_what_differs(self, modules: Sequence[nn.Module]) -> None:
        """Say which buffers each worker has filled with its own samples, first of all by memories of them."""
        # Batch normalisation has a line of its own; what was never synchronised is no sign of anything.
        looked = [module for module in modules if module in self._last and not isinstance(module, _NormBase)]
        looked = [module for module in looked if self._looked.setdefault(module, 0) < _LOOKS]
        named = [(module, name) for module in looked for name, buffer in module._buffers.items() if buffer is not None]
        alike = are_alike(self._team, [module._buffers[name] for module, name in named])  # type: ignore[misc]
        for (module, name), is_alike in zip(named, alike, strict=True):
            if not is_alike:
                self._looked[module] = _LOOKS
                self._report.say(
                    f"{type(module).__name__}: buffer {name} is filled by each worker with its own samples, and all "
                    "take worker 0's: what the others remember is lost, so this is not what one machine computes"
                )
        for module in looked:
            self._looked[module] += 1

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
