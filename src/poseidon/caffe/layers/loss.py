"""The common base of loss layers: a scalar top that counts towards the objective, and its normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Layer, exactly
from poseidon.caffe.schema.messages import LossParameter


class LossLayer(Layer):
    """Base of losses: bottom 0 is the prediction, bottom 1 the target; the loss weight defaults to 1."""

    bottom_count = exactly(2)
    makes_missing_tops = True

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        if not self.param.loss_weight:
            self.param.loss_weight.append(1)
            self.param.loss_weight.extend([0] * (len(tops) - 1))

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        self.check_same_rows(bottoms)
        return [()]

    def check_same_rows(self, bottoms: Sequence[Shape]) -> None:
        """Raise if prediction and target have different numbers of rows."""
        if len(bottoms) > 1 and bottoms[0][:1] != bottoms[1][:1]:
            first, second = self.param.bottom[:2]
            raise self.error(
                f"bottoms {first!r} of shape {bottoms[0]} and {second!r} of shape {bottoms[1]} "
                "must have the same first dimension"
            )

    def allow_force_backward(self, bottom_index: int) -> bool:
        return bottom_index != 1


class Normalizer:
    """The divisor of a summed loss, by ``loss_param``'s normalization; at least one."""

    def __init__(self, loss_param: LossParameter) -> None:
        if not loss_param.HasField("normalization") and loss_param.HasField("normalize"):
            self._mode = LossParameter.VALID if loss_param.normalize else LossParameter.BATCH_SIZE
        else:
            self._mode = loss_param.normalization

    def divisor(self, outer: int, inner: int, valid: torch.Tensor | int | None) -> torch.Tensor | float:
        """Return the divisor for ``outer`` rows of ``inner`` predictions, ``valid`` of them not ignored."""
        if self._mode == LossParameter.FULL or (self._mode == LossParameter.VALID and valid is None):
            return max(1.0, float(outer * inner))
        if self._mode == LossParameter.VALID:
            assert valid is not None
            return valid.clamp(min=1) if isinstance(valid, torch.Tensor) else max(1.0, float(valid))
        return max(1.0, float(outer)) if self._mode == LossParameter.BATCH_SIZE else 1.0
