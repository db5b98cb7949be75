"""pycaffe's Net: a net with arrays going in and out by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe import net as core
from poseidon.caffe import weights as weight_files
from poseidon.caffe.blob import Blob, BlobVec
from poseidon.caffe.layers.base import Layer
from poseidon.caffe.memory import Array
from poseidon.caffe.schema import NetParameter
from poseidon.caffe.upgrade import read_net
from poseidon.errors import ConfigError

Arrays = dict[str, NDArray[Any]]


class Net(core.BuiltNet):
    """``Net(prototxt, phase, level=0, stages=None, weights=None)``, or the older ``Net(prototxt, weights, phase)``."""

    def __init__(
        self,
        network_file: str | os.PathLike[str],
        phase: Any,
        level: Any = 0,
        stages: Sequence[str] | None = None,
        weights: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(phase, (str, os.PathLike)):
            phase, level, weights = level, 0, phase
        param = read_net(network_file)
        param.state.phase = phase
        param.state.level = level
        param.state.stage.extend(stages or ())
        try:
            super().__init__(param)
        except ConfigError as error:
            raise ConfigError(f"{network_file}: {error}") from error
        if weights is not None:
            self.copy_from(weights)

    @classmethod
    def from_proto(cls, param: NetParameter) -> Net:
        """Build a net from a NetParameter whose phase, level and stages are set."""
        net = cls.__new__(cls)
        core.BuiltNet.__init__(net, param)
        return net

    # The parts of the net.

    @cached_property
    def blobs(self) -> dict[str, Blob]:
        """The blobs by name, from input to output."""
        return dict(zip(self._blob_names, self.blob_list, strict=True))

    @cached_property
    def params(self) -> dict[str, BlobVec]:
        """The parameters of each layer that has any."""
        return {layer.name: layer.blobs for layer in self.layers if layer.blobs}

    @property
    def blob_loss_weights(self) -> dict[str, float]:
        """The weight of each blob in the objective, by name."""
        return dict(zip(self._blob_names, self.loss_weights, strict=True))

    @cached_property
    def layer_dict(self) -> dict[str, Layer]:
        """The layers by name."""
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def inputs(self) -> list[str]:
        """Names of the blobs that the caller fills."""
        return [self._blob_names[i] for i in self.input_ids]

    @cached_property
    def outputs(self) -> list[str]:
        """Names of the blobs that no layer reads."""
        return [self._blob_names[i] for i in self.output_ids]

    @cached_property
    def top_names(self) -> dict[str, list[str]]:
        """For each layer, the names of the blobs it writes."""
        return self._names_by_layer(self.top_ids)

    @cached_property
    def bottom_names(self) -> dict[str, list[str]]:
        """For each layer, the names of the blobs it reads."""
        return self._names_by_layer(self.bottom_ids)

    @property
    def _layer_names(self) -> list[str]:
        return self.layer_names

    @property
    def _blob_names(self) -> list[str]:
        return self.blob_names

    @property
    def _blobs(self) -> list[Blob]:
        return self.blob_list

    @property
    def _inputs(self) -> list[int]:
        return self.input_ids

    @property
    def _outputs(self) -> list[int]:
        return self.output_ids

    @property
    def _blob_loss_weights(self) -> list[float]:
        return self.loss_weights

    def _bottom_ids(self, layer_index: int) -> list[int]:
        return self.bottom_ids(layer_index)

    def _top_ids(self, layer_index: int) -> list[int]:
        return self.top_ids(layer_index)

    def _names_by_layer(self, ids: Any) -> dict[str, list[str]]:
        names = self._blob_names
        return {layer.name: [names[j] for j in ids(i)] for i, layer in enumerate(self.layers)}

    # Running.

    def forward(
        self,
        blobs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **inputs: NDArray[Any],
    ) -> dict[str, Array]:
        """Set the given inputs, run forward between two named layers, and return the outputs by name."""
        first = 0 if start is None else self._layer_index(start)
        last = len(self.layers) - 1 if end is None else self._layer_index(end)
        wanted = [*(self.outputs if end is None else self.top_names[end]), *(blobs or ())]
        if inputs:
            self._set_arrays(inputs, self.inputs, "input", "data")
        self._forward(first, last)
        named = self.blobs
        return {name: named[name].data for name in dict.fromkeys(wanted)}

    def backward(
        self,
        diffs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **output_diffs: NDArray[Any],
    ) -> dict[str, Array]:
        """Set the given output gradients, run backward between two named layers, return the inputs' gradients."""
        first = len(self.layers) - 1 if start is None else self._layer_index(start)
        last = 0 if end is None else self._layer_index(end)
        wanted = [*(self.inputs if end is None else self.bottom_names[end]), *(diffs or ())]
        if output_diffs:
            self._set_arrays(output_diffs, self.outputs, "output", "diff")
        self._backward(first, last)
        named = self.blobs
        return {name: named[name].diff for name in dict.fromkeys(wanted)}

    def forward_all(self, blobs: Sequence[str] | None = None, **inputs: NDArray[Any]) -> dict[str, Array]:
        """Run any number of rows through the net in batches of its size and return all outputs."""
        parts: dict[str, list[Array]] = {}
        for batch in self._batch(inputs):
            for name, values in self.forward(blobs, None, None, **batch).items():
                parts.setdefault(name, []).extend(values.copy())
        rows = len(next(iter(inputs.values())))
        return {name: np.asarray(values)[:rows] for name, values in parts.items()}

    def forward_backward_all(
        self, blobs: Sequence[str] | None = None, diffs: Sequence[str] | None = None, **arrays: NDArray[Any]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run forward and backward over any number of rows; return all outputs and all input gradients."""
        all_blobs: dict[str, list[Array]] = {}
        all_diffs: dict[str, list[Array]] = {}
        forward_batches = self._batch({name: arrays[name] for name in self.inputs if name in arrays})
        backward_batches = self._batch({name: arrays[name] for name in self.outputs if name in arrays})
        for inputs, output_diffs in zip_longest(forward_batches, backward_batches):
            for name, values in self.forward(blobs, None, None, **(inputs or {})).items():
                all_blobs.setdefault(name, []).extend(values.copy())
            for name, values in self.backward(diffs, None, None, **(output_diffs or {})).items():
                all_diffs.setdefault(name, []).extend(values.copy())
        rows = len(next(iter(arrays.values())))
        return (
            {name: np.asarray(values)[:rows] for name, values in all_blobs.items()},
            {name: np.asarray(values)[:rows] for name, values in all_diffs.items()},
        )

    def _forward(self, start: int, end: int) -> float:
        return self.run_forward(start, end)

    def _backward(self, start: int, end: int) -> None:
        self.run_backward(start, end)

    def before_forward(self, call: core.Callback) -> None:
        """Call with each layer's number before its forward step."""
        self.before_forward_callbacks.append(call)

    def after_forward(self, call: core.Callback) -> None:
        """Call with each layer's number after its forward step."""
        self.after_forward_callbacks.append(call)

    def before_backward(self, call: core.Callback) -> None:
        """Call with each layer's number before its backward step."""
        self.before_backward_callbacks.append(call)

    def after_backward(self, call: core.Callback) -> None:
        """Call with each layer's number after its backward step."""
        self.after_backward_callbacks.append(call)

    def set_input_arrays(self, data: NDArray[Any], labels: NDArray[Any]) -> None:
        """Set the rows that the MemoryData layer, which must come first, returns batch by batch."""
        if labels.ndim == 1:
            labels = labels[:, np.newaxis, np.newaxis, np.newaxis]
        self._set_input_arrays(np.ascontiguousarray(data), np.ascontiguousarray(labels))

    def _set_input_arrays(self, data: NDArray[Any], labels: NDArray[Any]) -> None:
        first: Any = self.layers[0]
        if first.type != "MemoryData":
            raise ConfigError(
                f"set_input_arrays needs a net whose first layer is of type MemoryData; "
                f"the first layer of net {self.name!r} is {first.name!r} ({first.type})"
            )
        first.reset(data, labels)

    # Weights.

    def copy_from(self, path: str | os.PathLike[str]) -> None:
        """Copy the parameters of layers with the same name from a ``.caffemodel`` or HDF5 file."""
        weight_files.load(self, path)

    def share_with(self, other: Net) -> None:
        """Share the parameter values of layers of the same name in another net from now on."""
        weight_files.share(self, other)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``.caffemodel``."""
        weight_files.save(self, path)

    def save_hdf5(self, path: str | os.PathLike[str]) -> None:
        """Write the parameters as HDF5."""
        weight_files.save_hdf5(self, path)

    def load_hdf5(self, path: str | os.PathLike[str]) -> None:
        """Copy parameters from an HDF5 file."""
        weight_files.load_hdf5(self, path)

    # Helpers.

    def _layer_index(self, name: str) -> int:
        if name not in self.layer_names:
            raise ConfigError(f"net {self.name!r} has no layer {name!r}; it has: {', '.join(self.layer_names)}")
        return self.layer_names.index(name)

    def _set_arrays(self, arrays: Arrays, expected: list[str], what: str, side: str) -> None:
        if set(arrays) != set(expected):
            raise ConfigError(f"{what} arrays {sorted(arrays)} do not match the net's {what}s {sorted(expected)}")
        named = self.blobs
        for name, values in arrays.items():
            if values.shape[0] != named[name].shape[0]:
                raise ConfigError(
                    f"array for {what} {name!r} has {values.shape[0]} rows; the net's batch has {named[name].shape[0]}"
                )
            getattr(named[name], side)[...] = values

    def _batch(self, arrays: Arrays) -> Iterator[Arrays]:
        """Cut arrays into batches of the net's size; the last one is padded with zeros."""
        if not arrays:
            return
        size = self.blob_list[0].shape[0]
        rows = len(next(iter(arrays.values())))
        for begin in range(0, rows, size):
            batch = {name: np.asarray(values[begin : begin + size]) for name, values in arrays.items()}
            missing = size - min(rows - begin, size)
            if missing:
                batch = {
                    name: np.concatenate([values, np.zeros((missing, *values.shape[1:]))])
                    for name, values in batch.items()
                }
            yield batch
