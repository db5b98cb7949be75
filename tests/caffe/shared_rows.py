"""A data layer for tests with several workers: together they read what one worker with the total batch would read."""

from __future__ import annotations

import pytest
import torch

from poseidon.caffe.io.sharding import this_worker
from poseidon.caffe.layers import Layer, registry
from poseidon.caffe.layers.base import exactly

ROWS = 96


class SharedRows(Layer):
    """Tops: images (2 x 6 x 6), labels below 5, words below 11. ``batch_size`` counts this worker's rows."""

    type = "SharedRows"
    bottom_count = exactly(0)
    top_count = exactly(3)

    def setup(self, bottoms, tops):
        generator = torch.Generator().manual_seed(7)
        self._images = torch.randn(ROWS, 2, 6, 6, generator=generator)
        self._labels = torch.randint(5, (ROWS,), generator=generator).float()
        self._words = torch.randint(11, (ROWS, 3), generator=generator).float()
        self._batch = self.param.data_param.batch_size
        world = this_worker()
        self._next, self._stride = world.rank * self._batch, world.size * self._batch

    def top_shapes(self, bottoms):
        return [(self._batch, 2, 6, 6), (self._batch,), (self._batch, 3)]

    def forward(self, bottoms, tops):
        rows = (torch.arange(self._batch) + self._next) % ROWS
        self._next += self._stride
        for top, values in zip(tops, (self._images, self._labels, self._words), strict=True):
            top.put_data(values[rows])

    def backward(self, tops, propagate_down, bottoms):
        pass


@pytest.fixture(autouse=True)
def shared_rows(monkeypatch):
    """The layer, known while a test runs; tests import this name to have it."""
    monkeypatch.setitem(registry._TYPES, SharedRows.type, SharedRows)


def knowing_the_layer(function, *args):
    """Call a function in a process of its own, which knows the layer too."""
    registry._TYPES[SharedRows.type] = SharedRows
    return function(*args)


NET = """
name: "shared"
layer { name: "rows" type: "SharedRows" top: "data" top: "label" top: "words" data_param { batch_size: %d } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "embed" type: "Embed" bottom: "words" top: "embed"
  embed_param { input_dim: 11 num_output: 6 weight_filler { type: "uniform" min: -1 max: 1 } } }
layer { name: "ip1" type: "InnerProduct" bottom: "conv" top: "ip1"
  inner_product_param { num_output: 12 weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.1 } } }
layer { name: "relu" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "ip2" type: "InnerProduct" bottom: "embed" top: "ip2"
  inner_product_param { num_output: 12 transpose: true weight_filler { type: "xavier" } } }
layer { name: "twin_a" type: "InnerProduct" bottom: "ip1" top: "a"
  param { name: "w" } inner_product_param { num_output: 5 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "twin_b" type: "InnerProduct" bottom: "ip2" top: "b"
  param { name: "w" } inner_product_param { num_output: 5 bias_term: false } }
layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "b" top: "sum" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "sum" bottom: "label" top: "loss" }
"""


def write_solver(folder, batch, text):
    (folder / "net.prototxt").write_text(NET % batch)
    path = folder / "solver.prototxt"
    path.write_text(
        f'net: "{folder}/net.prototxt" snapshot_prefix: "{folder}/snap" base_lr: 0.1 lr_policy: "fixed" '
        f"momentum: 0.9 weight_decay: 0.01 max_iter: 100 random_seed: 3 snapshot_after_train: false {text}"
    )
    return path


def values(net):
    return {name: [blob.data.copy() for blob in blobs] for name, blobs in net.params.items()}
