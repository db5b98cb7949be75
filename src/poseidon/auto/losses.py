"""``--same-loss``: a training loss that the script reads as a number is the mean over workers.

Scripts stop early, lower learning rates and keep the best checkpoint by such numbers, which would differ between
workers. Reading becomes collective, so every worker must read as often as the others: before each read, each backward,
the end of a training pass and the end of the script the workers compare what they are about to do. A worker that does
something else is an error on all of them, at once, instead of a wait that never ends.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poseidon.auto.step import ScriptStep
from poseidon.errors import MismatchError
from poseidon.following.nesting import Nesting
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team

_KEPT = 64
"""Losses to remember: those of so many backwards may still be read."""

DOINGS = ("reads a loss", "begins a backward", "ends a pass over a loader", "ends the script")
READ, BACKWARD, PASS, END = range(4)


@dataclass(frozen=True)
class _Loss:
    value: Tensor
    """Keeps the memory, so that no other tensor can have its address."""
    weight: float
    version: int
    mean: float | None = None


class SameLoss:
    """Replaces losses that are read by their means."""

    def __init__(self, team: Team, step: ScriptStep, report: ScriptReport) -> None:
        # A team of its own: its messages cannot be taken for those of an exchange.
        self._team = Team(None, team.timeout_s)
        self._step = step
        self._report = report
        self._losses: dict[int, _Loss] = {}
        self._counts = [0] * len(DOINGS)
        self._nesting = Nesting()

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        for name in ("item", "__float__"):
            patches.wrap(Tensor, name, self._read)
        patches.on_undo(self._team.close)

    def announce(self, doing: int, word: int = 0) -> list[int]:
        """Compare what the workers are about to do; return each one's word. Collective."""
        self._counts[doing] += 1
        row = [doing, self._counts[doing], word]
        rows = self._team.gather_ints(row, f"the others, while this worker {DOINGS[doing]} (--same-loss)")
        if (difference := find_difference(rows)) is not None:
            raise MismatchError(difference)
        return [row[2] for row in rows]

    def begin_backward(self, outputs: Sequence[Tensor]) -> None:
        """Remember the losses of a backward. Collective."""
        self.announce(BACKWARD)
        for output in outputs:
            if output.numel() == 1:
                self._remember(output, None)

    def _read(self, original: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        if self._nesting.is_inside or not self._is_loss(tensor):
            return original(tensor)
        with self._nesting.enter():
            known = self._losses.get(tensor.data_ptr())
            if known is None or known.version != tensor._version:
                known = self._remember(tensor, None)
            if known.mean is None:
                self._report.say("losses that the script reads are the workers' means (--same-loss)")
                (word,) = struct.unpack("<q", struct.pack("<d", float(original(tensor)) * known.weight))
                parts = [struct.unpack("<d", struct.pack("<q", one))[0] for one in self.announce(READ, word)]
                known = self._remember(tensor, sum(parts) / len(parts))
            assert known.mean is not None
            return known.mean

    def _is_loss(self, tensor: Tensor) -> bool:
        if tensor.numel() != 1 or not tensor.is_floating_point() or type(tensor) is not Tensor:
            return False
        known = self._losses.get(tensor.data_ptr())
        if known is not None and known.version == tensor._version:
            return True
        return tensor.grad_fn is not None and not self._step.is_shared

    def _remember(self, tensor: Tensor, mean: float | None) -> _Loss:
        place = tensor.data_ptr()
        before = self._losses.pop(place, None)
        if before is not None and before.version == tensor._version:
            loss = _Loss(before.value, before.weight, before.version, before.mean if mean is None else mean)
        else:
            loss = _Loss(tensor.detach(), self._step.weight, tensor._version, mean)
        self._losses[place] = loss
        if len(self._losses) > _KEPT:
            del self._losses[next(iter(self._losses))]
        return loss


def tell_of_own_losses(patches: Patches, step: ScriptStep, report: ScriptReport) -> None:
    """Say, when a script first reads the loss of its part of a batch, whose number that is."""

    def read(original: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        is_seen = step.is_dealt and not torch.compiler.is_compiling()
        if is_seen and tensor.grad_fn is not None and not _is_called_by_us():
            report.say(
                "a loss that the script reads, and other numbers that it computes from training batches, are those of "
                "this worker's part (--same-loss: losses are the workers' mean)"
            )
        return original(tensor)

    for name in ("item", "__float__"):
        patches.wrap(Tensor, name, read)


def _is_called_by_us() -> bool:
    frame = sys._getframe(3)  # beyond this, the function above and the patch
    return str(frame.f_globals.get("__name__", "")).startswith("poseidon.")


def find_difference(rows: Sequence[Sequence[int]]) -> str | None:
    """Return in words how the workers' doings differ, if they do. Pure."""
    if len({tuple(row[:2]) for row in rows}) == 1:
        return None
    said = ", ".join(f"worker {rank} {DOINGS[row[0]]} (number {row[1]})" for rank, row in enumerate(rows))
    return (
        f"{said}: with --same-loss all workers must read losses equally often, and do the same in between. Read the "
        "loss on every worker, or run without --same-loss"
    )
