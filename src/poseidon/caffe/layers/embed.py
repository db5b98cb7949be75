"""Embed: looks rows up in a learned table; its gradient touches only the rows that were looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from poseidon.caffe.blob import Shape
from poseidon.caffe.layers.base import Blobs, Layer
from poseidon.caffe.layers.labels import as_indices, refuse_gradient
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema import LayerParameter

RowsSink = Callable[[torch.Tensor, torch.Tensor], None]


@register("Embed")
class Embed(Layer):
    """Replaces every number in the bottom by its row of the table, plus a bias."""

    def __init__(self, param: LayerParameter) -> None:
        super().__init__(param)
        self.rows_sink: RowsSink | None = None
        """Takes (row numbers, one gradient per row) of a backward pass instead of the table's gradient; a row that
        was looked up several times appears several times, and its gradient is the sum."""

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        settings = self.param.embed_param
        if not settings.num_output or not settings.input_dim:
            raise self.error(
                f"embed_param needs a positive num_output and input_dim; they are {settings.num_output} "
                f"and {settings.input_dim}"
            )
        self._outputs: int = settings.num_output
        self.make_param(0, (settings.input_dim, self._outputs), settings.weight_filler)
        if settings.bias_term:
            self.make_param(1, (self._outputs,), settings.bias_filler)

    def top_shapes(self, bottoms: Sequence[Shape]) -> Sequence[Shape]:
        return [(*bottoms[0], self._outputs)]

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        table = self.blobs[0].data_tensor
        self._rows = as_indices(self, 0, bottoms[0].data_tensor, table.shape[0], "row numbers")
        result = F.embedding(self._rows, table)
        tops[0].put_data(result.add_(self.blobs[1].data_tensor) if len(self.blobs) > 1 else result)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        refuse_gradient(self, propagate_down, 0, "row numbers")
        diff = tops[0].diff_tensor.reshape(-1, self._outputs)
        if self.param_propagate_down[0]:
            self._add_table_diff(self._rows.reshape(-1), diff)
        if len(self.blobs) > 1 and self.param_propagate_down[1]:
            self.blobs[1].add_diff(diff.sum(0))

    def allow_force_backward(self, bottom_index: int) -> bool:
        return False

    def _add_table_diff(self, rows: torch.Tensor, diff: torch.Tensor) -> None:
        if self.rows_sink is not None:
            self.rows_sink(rows, diff)
        elif self.blobs[0].has_diff:
            self.blobs[0].diff_tensor.index_add_(0, rows, diff)
        else:
            self.blobs[0].add_diff(diff.new_zeros(self.blobs[0].shape).index_add_(0, rows, diff))
