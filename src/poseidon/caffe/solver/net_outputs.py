"""The outputs of a net, logged in Caffe's words."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poseidon.caffe.net import BuiltNet

log = logging.getLogger("poseidon.caffe")


@dataclass(frozen=True)
class NetOutput:
    """One output value of a net."""

    name: str
    value: float
    loss_weight: float

    @property
    def loss_note(self) -> str:
        """The suffix in the log of an output that is part of the objective."""
        if not self.loss_weight:
            return ""
        return f" (* {self.loss_weight:g} = {self.loss_weight * self.value:g} loss)"


def output_values(net: BuiltNet) -> torch.Tensor:
    """Return the values of all output blobs, concatenated."""
    parts = [net.blob_list[i].data_tensor.reshape(-1) for i in net.output_ids]
    return torch.cat(parts) if parts else torch.empty(0)


def label_outputs(net: BuiltNet, values: Sequence[float]) -> list[NetOutput]:
    """Attach names and loss weights to the values of :func:`output_values`."""
    weights = net.loss_weights
    labels = [(net.blob_names[i], weights[i]) for i in net.output_ids for _ in range(net.blob_list[i].count)]
    return [NetOutput(name, value, weight) for (name, weight), value in zip(labels, values, strict=True)]


def log_outputs(which: str, outputs: Sequence[NetOutput]) -> None:
    """Log one line per value; ``which`` is Train or Test."""
    for number, output in enumerate(outputs):
        # Log as the calling solver: programs that read logs look for its file name.
        line = ("    %s net output #%d: %s = %g%s", which, number, output.name, output.value, output.loss_note)
        log.info(*line, stacklevel=2)


class LossWindow:
    """The mean of the last ``average_loss`` losses."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._losses: list[float] = []
        self._next = 0
        self.mean = 0.0

    def add(self, loss: float) -> None:
        """Add the loss of an iteration."""
        if len(self._losses) < self._size:
            self._losses.append(loss)
        else:
            self._losses[self._next % self._size] = loss
            self._next += 1
        self.mean = sum(self._losses) / len(self._losses)
