"""Collect single samples into batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from poseidon.caffe.io.datum import Values
from poseidon.caffe.io.transform import Transform


class Sample(NamedTuple):
    """One image or record, not yet transformed."""

    values: Values
    label: float
    origin: str
    """Names file and key, or line, in errors."""


def batched(samples: Iterator[Sample], transform: Transform, batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield data and labels of ``batch_size`` transformed samples at a time; the first decides the batch's shape."""
    while True:
        sample = next(samples, None)
        if sample is None:
            return
        data = np.empty((batch_size, *transform.shape(sample.values.shape, sample.origin)), np.float32)
        labels = np.empty(batch_size, np.float32)
        for row in range(batch_size):
            if row:
                sample = next(samples)
            transform(sample.values, data[row], sample.origin)
            labels[row] = sample.label
        yield torch.from_numpy(data), torch.from_numpy(labels)
