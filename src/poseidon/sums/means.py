"""How sums become mean gradients where owners take the step, and how weights travel: on the host or on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from poseidon.sums.chunks import Chunk
from poseidon.sums.device import DeviceAdder, WeightChange
from poseidon.sums.encodings import Encoded, Encoding
from poseidon.sums.host import HostAdder
from poseidon.sums.messages import Layouts
from poseidon.wire.formats import Array, Format

Lane = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes what runs inside use another stream of the device than the model's computation does."""


class MeanMaker(Protocol):
    """What :class:`~poseidon.sums.stepping.StepAdder` asks of an arithmetic besides sums."""

    layouts: Layouts
    """How weights may be encoded, besides the ways of the adder."""

    def mean(self, chunk: Chunk, total: Any) -> Tensor:
        """Return the mean gradient, given a finished sum."""

    def payload(self, chunk: Chunk, mean: Tensor) -> memoryview:
        """Return a mean as it is fetched."""

    def encode(self, chunk: Chunk, weights: Tensor, change: WeightChange | None) -> Encoded:
        """Return weights as they travel; perhaps as their change, if all workers have what that is from."""

    def close(self) -> Any:
        """End the step, as an adder does."""


class HostMeans:
    """Sums in host memory, divided by the number of workers; half precision is rounded once."""

    def __init__(self, inner: HostAdder, number_format: Format, dtype: torch.dtype, workers: int) -> None:
        self.layouts: Layouts = {}
        self._inner = inner
        self._format = number_format
        self._dtype = dtype
        self._workers = workers

    def mean(self, chunk: Chunk, total: Array) -> Tensor:  # noqa: ARG002 - as in the contract
        """Divide, in the memory of the sum."""
        total /= self._workers
        return torch.from_numpy(self._format.narrow(total)).view(self._dtype)

    def payload(self, chunk: Chunk, mean: Tensor) -> memoryview:  # noqa: ARG002 - as in the contract
        """Return the mean where it lies."""
        return bytes_of(mean)

    def encode(self, chunk: Chunk, weights: Tensor, change: WeightChange | None) -> Encoded:  # noqa: ARG002
        """Let the adder encode them as it does sums: rounded ones get shorter."""
        stored = weights.cpu().view(torch.uint8).numpy().view(self._format.stored)
        return self._inner.encode(chunk, self._format.widen(stored))

    def close(self) -> Any:
        """End the step."""
        return self._inner.close()


class DeviceMeans:
    """Sums on a device, and weights compacted by it."""

    def __init__(self, inner: DeviceAdder, dtype: torch.dtype, workers: int, lane: Lane) -> None:
        changes = (Encoding.CHANGE, Encoding.ROUNDED_CHANGE) if dtype is torch.float32 else ()
        self.layouts: Layouts = dict.fromkeys(changes, inner.layouts[Encoding.COMPACT])
        self._inner = inner
        self._dtype = dtype
        self._workers = workers
        self._lane = lane

    def mean(self, chunk: Chunk, total: Any) -> Tensor:  # noqa: ARG002 - it lies on the device
        """Divide, in new memory: the weights come where the sum lies."""
        with self._lane():
            own = self._inner.sum_of(chunk)
            if self._dtype is not torch.float32:  # divided as it was rounded
                return own.clone()
            # Not by a number, which CUDA would multiply by the inverse of.
            return own / torch.full((), self._workers, dtype=own.dtype, device=own.device)

    def payload(self, chunk: Chunk, mean: Tensor) -> memoryview:  # noqa: ARG002 - as in the contract
        """Return a copy in host memory."""
        with self._lane():
            return bytes_of(mean)

    def encode(self, chunk: Chunk, weights: Tensor, change: WeightChange | None) -> Encoded:
        """Compact them."""
        return self._inner.encode_instead(chunk, weights, change)

    def close(self) -> Any:
        """Let whoever takes the weights restore them: only then are the old ones surely those of all workers."""
        return self._inner.close_later() if self.layouts else self._inner.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a flat tensor; of a copy if that is on a device."""
    return memoryview(tensor.cpu().view(torch.uint8).numpy().data)
