"""Copies one worker's tensors to all others, packed into one message whatever their types."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.team.team import Team
from poseidon.team.verify import are_alike

_MESSAGE_BYTES = 16 * 2**20


class Mirror:
    """Some tensors of one device and the flat message in which they travel together; made once, used every step."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Widest types first, so that every part is aligned for its type.
        ordered = sorted((t.detach() for t in tensors), key=lambda tensor: -tensor.element_size())
        sizes = [tensor.numel() * tensor.element_size() for tensor in ordered]
        self._message = torch.empty(sum(sizes), dtype=torch.uint8, device=ordered[0].device)
        self._groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        start = 0
        for tensor, size in zip(ordered, sizes, strict=True):
            part = self._message[start : start + size].view(tensor.dtype).view(tensor.shape)
            mine, parts = self._groups[tensor.dtype]
            mine.append(tensor)
            parts.append(part)
            start += size

    def copy_from(self, team: Team, source: int, what: str) -> None:
        """Make the tensors equal to ``source``'s. Collective."""
        self.start_copy(team, source, what)()

    def start_copy(self, team: Team, source: int, what: str) -> Callable[[], None]:
        """Start to make the tensors equal to ``source``'s present ones; call the result to complete it. Collective.

        By NCCL if it serves their device, else over the wire.
        """
        if team.rank == source:
            self._copy(is_packing=True)
        if self._message.is_cuda and team.is_nccl:
            return self._start_by_nccl(team, source, what)
        host = self._message.cpu()
        done = team.start_broadcast(host.numpy().data, source)

        def complete() -> None:
            for future in done:
                team.result(future, what)
            if team.rank != source:
                self._message.copy_(host)
                self._copy(is_packing=False)

        return complete

    def _start_by_nccl(self, team: Team, source: int, what: str) -> Callable[[], None]:
        work = dist.broadcast(self._message, team.global_rank(source), group=team.group, async_op=True)

        def complete() -> None:
            team.wait_for(work, self._message, what, source)
            if team.rank != source:
                self._copy(is_packing=False)

        return complete

    @torch.no_grad()
    def _copy(self, is_packing: bool) -> None:
        for mine, parts in self._groups.values():
            if is_packing:
                torch._foreach_copy_(parts, mine)
            else:
                torch._foreach_copy_(mine, parts)


def mirrors_of(tensors: Sequence[Tensor]) -> list[Mirror]:
    """Return one mirror per device that holds any of the tensors."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return [Mirror(group) for group in by_device.values()]


def mirror_all(team: Team, tensors: Sequence[Tensor], source: int, what: str) -> None:
    """Make any number of tensors equal to ``source``'s, in messages of bounded size. Collective."""
    batch: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and (size > _MESSAGE_BYTES or tensor.device != batch[0].device):
            Mirror(batch).copy_from(team, source, what)
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if batch:
        Mirror(batch).copy_from(team, source, what)


def mirror_different(team: Team, tensors: Sequence[Tensor], source: int, what: str) -> None:
    """Make tensors equal to ``source``'s; those that all workers hold alike do not travel. Collective.

    Most programs build their model from one seed or one file, and on a slow link a large one takes minutes.
    """
    alike = are_alike(team, tensors)
    mirror_all(team, [tensor for tensor, same in zip(tensors, alike, strict=True) if not same], source, what)
