"""Buffers such as running statistics: copied from one worker to the others, as torch's DDP does."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from poseidon.team.mirror import Mirror, mirrors_of
from poseidon.team.team import Team


class BufferSync:
    """Keeps the buffers of a module equal to one worker's. Its calls are collective."""

    def __init__(self, module: nn.Module, team: Team, ignored: Collection[str]) -> None:
        self._module = module
        self._team = team
        self._ignored = ignored
        self._mirrors: list[Mirror] = []
        self._mirrored: list[int] = []
        """``id()`` of each mirrored buffer."""
        self._under_way: list[Callable[[], None]] = []

    def sync(self, source: int) -> None:
        """Make the buffers equal to ``source``'s."""
        self.start(source)
        self.complete()

    def start(self, source: int) -> None:
        """Start copying ``source``'s buffers as they are now; :meth:`complete` applies the copy."""
        named = [(name, buffer) for name, buffer in self._module.named_buffers() if name not in self._ignored]
        if [id(buffer) for _, buffer in named] != self._mirrored:  # a buffer was replaced by assignment
            self._mirrored = [id(buffer) for _, buffer in named]
            self._mirrors = mirrors_of([buffer for _, buffer in named])
        self._under_way = [mirror.start_copy(self._team, source, "the buffers") for mirror in self._mirrors]

    def complete(self) -> None:
        """Apply the copy that was started, if any."""
        completions, self._under_way = self._under_way, []
        for complete in completions:
            complete()
