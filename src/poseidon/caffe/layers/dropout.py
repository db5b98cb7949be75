"""Dropout: zeroes values at random while training."""

from __future__ import annotations

import torch.nn.functional as F

from poseidon.caffe.layers.base import Blobs, Layer, Tensors
from poseidon.caffe.layers.registry import register


@register("Dropout")
class Dropout(Layer):
    """In the TRAIN phase zeroes a fraction of the values and scales up the others; otherwise the identity."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self._ratio: float = self.param.dropout_param.dropout_ratio
        if not 0 <= self._ratio < 1:
            raise self.error(f"dropout_ratio must be at least 0 and below 1; it is {self._ratio}")

    def compute(self, inputs: Tensors, params: Tensors) -> Tensors:
        return (F.dropout(inputs[0], self._ratio) if self.is_training else inputs[0],)
