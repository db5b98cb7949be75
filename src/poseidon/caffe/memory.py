"""One array of a blob: a tensor on the net's device and, on request, a live numpy view of it.

A layer's result usually *becomes* the memory, without a copy. Only while someone holds the numpy view is a result
copied into the viewed memory, so that the view stays live as in Caffe.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.caffe import device

Array = NDArray[np.float32]


class Memory:
    """Storage of ``count`` single-precision values, zero until written; shared between blobs by reference."""

    __slots__ = ("_borrowed", "_host", "_shape", "_tensor", "_view")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._tensor: torch.Tensor | None = None
        self._borrowed = False
        self._view: weakref.ref[Array] | None = None
        self._host: torch.Tensor | None = None

    @property
    def is_zero(self) -> bool:
        """Whether nothing has been written since it was created or cleared."""
        return self._tensor is None and self._host is None

    @property
    def is_borrowed(self) -> bool:
        """Whether the tensor also backs another blob."""
        return self._borrowed

    @property
    def is_viewed(self) -> bool:
        """Whether anyone holds a numpy view of this memory."""
        return self._view is not None and self._view() is not None

    def tensor(self) -> torch.Tensor:
        """Return the values on the active device; writing into the tensor writes into the memory."""
        target = device.active()
        if self._host is not None:
            # The holder of the view of GPU memory may have written to it.
            self._tensor, self._host = self._host.to(target), None
        elif self._tensor is None:
            self._tensor = torch.zeros(self._shape, dtype=torch.float32, device=target)
        elif self._tensor.device != target:
            self._tensor = self._tensor.to(target)
        return self._tensor

    def put(self, values: torch.Tensor, borrowed: bool = False) -> None:
        """Make ``values`` the new content, without a copy unless a view has to stay live.

        ``borrowed`` says that the tensor also backs another blob; it is then copied before anyone gets a view.
        """
        if self._tensor is not None and self._view is not None and self._tensor.device.type == "cpu":
            if self._view() is not None and self._tensor.numel() == values.numel():
                if self._tensor.data_ptr() != values.data_ptr():
                    self._tensor.copy_(values.reshape(self._tensor.shape))
                return
            self._view = None
        self._tensor = values
        self._host = None
        self._borrowed = borrowed

    def clear(self) -> None:
        """Set everything to zero; costs nothing while no view is held."""
        if self._tensor is not None and self.is_viewed and self._tensor.device.type == "cpu":
            self._tensor.zero_()
        else:
            self._shape = self._shape if self._tensor is None else tuple(self._tensor.shape)
            self._tensor = self._host = None
            self._borrowed = False

    def array(self) -> Array:
        """Return a live numpy view; on a GPU, a host copy that is written back before the next use."""
        tensor = self.tensor()
        view = None if self._view is None else self._view()
        if tensor.device.type == "cpu":
            if view is not None and view.shape == tensor.shape:
                return view
            if self._borrowed or not tensor.is_contiguous():
                tensor = self._tensor = tensor.clone(memory_format=torch.contiguous_format)
                self._borrowed = False
            view = tensor.numpy()
        else:
            self._host = tensor.cpu().contiguous()
            view = self._host.numpy()
        self._view = weakref.ref(view)
        return view
