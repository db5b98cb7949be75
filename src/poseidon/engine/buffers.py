"""Buffers such as running statistics: copied from one worker to the others, as torch's DDP does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from poseidon.engine.aside import aside
from poseidon.team.mirror import Mirror, mirrors_of
from poseidon.team.team import Team

BufferHook = Callable[[dict[str, Tensor]], Any]
"""Takes the buffers by name and exchanges them; may return futures to wait for at the end of backward."""


class BufferSync:
    """Keeps the buffers of a module equal to one worker's. Its calls are collective."""

    def __init__(self, module: nn.Module, team: Team, ignored: Collection[str]) -> None:
        # Not asked of the module in every step: with many layers that takes longer than to copy the buffers.
        self._owners = [(f"{prefix}." if prefix else "", owner._buffers) for prefix, owner in module.named_modules()]
        self._tables = [buffers for _, buffers in self._owners]
        self._team = team
        self._ignored = ignored
        self._mirrors: list[Mirror] = []
        self._mirrored: list[tuple[Tensor, int]] = []
        """Each mirrored buffer, and where its values are."""
        self._under_way: list[Callable[[], None]] = []

    @property
    def named(self) -> dict[str, Tensor]:
        """The buffers as they are now; any may have been replaced by assignment."""
        found: dict[Tensor, str] = {}
        for prefix, buffers in self._owners:
            for name, buffer in buffers.items():
                if buffer is not None:
                    found.setdefault(buffer, prefix + name)
        return {name: buffer for buffer, name in found.items() if name not in self._ignored}

    def sync(self, source: int) -> None:
        """Make the buffers equal to ``source``'s."""
        self.start(source)
        self.complete()

    def start(self, source: int) -> None:
        """Start copying ``source``'s buffers as they are now; :meth:`complete` applies the copy."""
        if not any(self._tables):
            return
        buffers = list(self.named.values())
        if not self._are_mirrored(buffers):
            self._mirrored = [(buffer, buffer.data_ptr()) for buffer in buffers]
            with aside():  # what is made in an evaluation in inference mode could not be written to in training
                self._mirrors = mirrors_of(buffers)
        self._under_way = [mirror.start_copy(self._team, source, "the buffers") for mirror in self._mirrors]

    def _are_mirrored(self, buffers: Sequence[Tensor]) -> bool:
        # A buffer may be another object, which may even have the id of one that is gone, or have got other memory.
        return len(buffers) == len(self._mirrored) and all(
            buffer is known and buffer.data_ptr() == place
            for buffer, (known, place) in zip(buffers, self._mirrored, strict=True)
        )

    def complete(self) -> None:
        """Apply the copy that was started, if any."""
        completions, self._under_way = self._under_way, []
        if not completions:
            return
        with _unnoticed(self.named.values()):
            for complete in completions:
                complete()

    def run(self, hook: BufferHook) -> None:
        """Let a hook exchange the buffers instead; futures that it returns are waited for by :meth:`complete`."""
        buffers = self.named
        with torch.no_grad(), _unnoticed(buffers.values()):
            futures = hook(buffers)
        self._under_way = [future.wait for future in futures or ()]


def _unnoticed(buffers: Collection[Tensor]) -> Any:
    """Return a context in which autograd does not notice that buffers change.

    Batch normalization saves its running statistics for backward but does not read them there in training, so a second
    forward before the backward must not invalidate the first.
    """
    versioned = tuple(buffer for buffer in buffers if not buffer.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(versioned)  # type: ignore[attr-defined]
