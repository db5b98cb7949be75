"""Buckets: gradients that share one collective and its latency."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount

import torch
from torch import Tensor, nn


class Bucket:
    """A group of parameters and the flat tensor in which their gradients travel together.

    A bucket of one parameter needs no extra tensor: the gradient travels in place.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], keep_views: bool, in_place: bool = True, lends: bool = False
    ) -> None:
        self.parameters = list(parameters)
        self._keep_views = keep_views
        """``.grad`` is a view of the flat tensor..."""
        self._lends = lends
        """... but whoever keeps a gradient that was cleared since shall not see it change."""
        self._in_place = in_place
        """A gradient that is alone may travel in place."""
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._references, self._uses = 0, 0
        """Of each view, and of the memory of all, while nobody else keeps any."""

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(parameter.numel() for parameter in self.parameters)

    def pack(self) -> Tensor:
        """Return all gradients as one flat tensor; a missing gradient counts as zero."""
        lone = self._lone_gradient()
        if lone is not None:
            return lone
        if self._lends and self._flat is not None:
            uses = torch._C._storage_Use_Count(self._flat.untyped_storage()._cdata)
            # In line, as it is asked for every bucket and step. A view that is still in ``.grad`` may count, too;
            # a thread of the wire that has not let go of the last step yet does: rarely, and it costs one tensor.
            if uses > self._uses or (max(map(getrefcount, self._views)) > self._references and self._is_kept()):
                self._allocate()
        flat = self.flat
        targets, sources = [], []
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.is_sparse:  # of a table whose look-up came before it was known that all is dense
                view.copy_(parameter.grad.to_dense())
            elif parameter.grad.data_ptr() != view.data_ptr():
                targets.append(view)
                sources.append(parameter.grad)
        if targets:
            torch._foreach_copy_(targets, sources)
        return flat

    @property
    def flat(self) -> Tensor:
        """The flat tensor, whatever it holds."""
        if self._flat is None:
            self._allocate()
        assert self._flat is not None
        return self._flat

    def unpack(self, is_used: Sequence[bool]) -> None:
        """Put the averaged values into ``.grad`` of the parameters that any worker used."""
        if self._flat is None:
            return
        targets, sources = [], []
        for parameter, view, used in zip(self.parameters, self._views, is_used, strict=True):
            if not used:
                continue
            if self._keep_views:
                parameter.grad = view
            elif parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = view.clone(memory_format=torch.preserve_format)
            else:
                targets.append(parameter.grad)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _is_kept(self) -> bool:
        """Whether somebody keeps a gradient that is not in ``.grad`` any more."""
        counts = list(map(getrefcount, self._views))  # all counted in one way
        return any(
            count > self._references + (parameter.grad is view)
            for parameter, view, count in zip(self.parameters, self._views, counts, strict=True)
        )

    def _lone_gradient(self) -> Tensor | None:
        if len(self.parameters) > 1 or self._flat is not None or not self._in_place:
            return None
        (parameter,) = self.parameters
        if parameter.grad is None or parameter.grad.is_sparse or not parameter.grad.is_contiguous():
            return None
        return parameter.grad.view(-1)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor that are like the parameters."""
        sizes = [parameter.numel() for parameter in self.parameters]
        return [_shaped_like(part, p) for part, p in zip(flat.split(sizes), self.parameters, strict=True)]

    def _allocate(self) -> None:
        first = self.parameters[0]
        self._flat = torch.empty(self.size, dtype=first.dtype, device=first.device)
        self._views = self.views_of(self._flat)
        self._references = max(map(getrefcount, self._views))
        self._uses = torch._C._storage_Use_Count(self._flat.untyped_storage()._cdata)


def _shaped_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """View ``flat`` with the parameter's shape and, if that is dense, its memory format (such as channels last)."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != expected:
            return flat.view(parameter.shape)
        expected *= size
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
