"""A net: layers built in the order of the prototxt, run forwards and backwards.

``BuiltNet`` takes a NetParameter in the current form (see ``upgrade.py``). ``pycaffe.py`` adds pycaffe's interface;
``weights.py`` reads and writes weights.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator

import torch

from poseidon.caffe import debug
from poseidon.caffe import layers as layer_types
from poseidon.caffe.blob import Blob
from poseidon.caffe.filter import filter_net
from poseidon.caffe.insert_splits import insert_splits
from poseidon.caffe.layers.base import Layer
from poseidon.caffe.learnable import LearnableParam, ParamTable
from poseidon.caffe.memory import Memory
from poseidon.caffe.pruning import LayerNeeds, prune
from poseidon.caffe.schema import LayerParameter, NetParameter
from poseidon.caffe.wiring import Wiring
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

Callback = Callable[[int], None]


class BuiltNet:
    """Layers and blobs of one phase of a model.

    Callbacks take the number of a layer. Those in ``after_backward_callbacks`` run as soon as that layer's parameter
    gradients are complete (for shared parameters see ``LearnableParam.ready_layer``), before the layers below compute
    theirs.
    """

    def __init__(self, param: NetParameter) -> None:
        filtered = filter_net(param)
        log.info("Initializing net from parameters: \n%s", filtered)
        self.param = insert_splits(filtered)
        self.name: str = param.name
        self.phase: int = param.state.phase
        self.debug_info: bool = param.debug_info
        self.layers: list[Layer] = []
        self.before_forward_callbacks: list[Callback] = []
        self.after_forward_callbacks: list[Callback] = []
        self.before_backward_callbacks: list[Callback] = []
        self.after_backward_callbacks: list[Callback] = []
        self._wiring = Wiring()
        self._params = ParamTable()
        self._needs: list[LayerNeeds] = []
        self._top_values = 0
        blob_needs: dict[int, bool] = {}
        for layer_param in self.param.layer:
            self._add_layer(layer_param, blob_needs)
        self._bottoms = [self._wiring.bottoms(i) for i in range(len(self.layers))]
        self._tops = [self._wiring.tops(i) for i in range(len(self.layers))]
        self._has_run = [False] * len(self.layers)
        prune(self._needs)
        if param.force_backward:
            self._force_backward()
        self._tell_layers()
        for i in self._wiring.output_ids():
            log.info("This network produces output %s", self._wiring.names[i])
        log.info("Network initialization done.")

    # The parts of the net.

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers in order, split layers included."""
        return [layer.name for layer in self.layers]

    @property
    def blob_names(self) -> list[str]:
        """Names of the blobs in order of creation."""
        return list(self._wiring.names)

    @property
    def learnable(self) -> list[LearnableParam]:
        """The parameters that a solver updates, each once, with their multipliers."""
        return self._params.learnable

    @property
    def param_table(self) -> ParamTable:
        """The owner and the sharers of every parameter."""
        return self._params

    @property
    def input_ids(self) -> list[int]:
        """Numbers of the blobs that the caller fills."""
        return [
            i
            for ids, layer in zip(self._wiring.top_ids, self.layers, strict=True)
            if layer.type == "Input"
            for i in ids
        ]

    @property
    def output_ids(self) -> list[int]:
        """Numbers of the blobs that no layer reads, sorted by name."""
        return self._wiring.output_ids()

    @property
    def blob_list(self) -> list[Blob]:
        """All blobs, in the order of ``blob_names``."""
        return self._wiring.blobs

    @property
    def loss_weights(self) -> list[float]:
        """The weight of each blob in the objective, in the order of ``blob_names``."""
        weights = [0.0] * len(self._wiring.blobs)
        for ids, layer in zip(self._wiring.top_ids, self.layers, strict=True):
            for blob_id, weight in zip(ids, layer.loss_weights, strict=True):
                weights[blob_id] = weight
        return weights

    def bottom_ids(self, layer_index: int) -> list[int]:
        """Numbers of the blobs a layer reads."""
        return list(self._wiring.bottom_ids[layer_index])

    def top_ids(self, layer_index: int) -> list[int]:
        """Numbers of the blobs a layer writes."""
        return list(self._wiring.top_ids[layer_index])

    def bottoms_of(self, layer_index: int) -> list[Blob]:
        """Return the blobs a layer reads."""
        return self._bottoms[layer_index]

    def tops_of(self, layer_index: int) -> list[Blob]:
        """Return the blobs a layer writes."""
        return self._tops[layer_index]

    # Running.

    def run_forward(self, start: int = 0, end: int | None = None) -> float:
        """Compute layers ``start`` to ``end`` (inclusive) and return the sum of their weighted losses."""
        last = self._checked(len(self.layers) - 1 if end is None else end, "end")
        loss = self._compute_layers(range(self._checked(start, "start"), last + 1))
        return 0.0 if loss is None else float(loss)

    def _compute_layers(self, layers: Iterable[int]) -> torch.Tensor | None:
        """Compute layers; return the sum of their weighted losses, which may not be there yet on a GPU."""
        losses: list[torch.Tensor] = []
        for i in layers:
            for call in self.before_forward_callbacks:
                call(i)
            self.compute(i)
            loss = self.layers[i].loss(self._tops[i])
            if loss is not None:
                losses.append(loss)
            if self.debug_info:
                debug.log_forward(self, i)
            for call in self.after_forward_callbacks:
                call(i)
        return sum(losses[1:], losses[0]) if losses else None

    def run_backward(self, start: int | None = None, end: int = 0) -> None:
        """Compute the gradients of layers ``start`` down to ``end`` (inclusive)."""
        first = self._checked(len(self.layers) - 1 if start is None else start, "start")
        for i in range(first, self._checked(end, "end") - 1, -1):
            for call in self.before_backward_callbacks:
                call(i)
            layer = self.layers[i]
            if layer.needs_backward:
                if not self._has_run[i]:
                    # Caffe uses whatever the blobs hold; our layers need what their forward saves.
                    self.compute(i)
                with torch.no_grad():
                    layer.backward(self._tops[i], layer.propagate_down, self._bottoms[i])
                if self.debug_info:
                    debug.log_backward(self, i)
            for call in self.after_backward_callbacks:
                call(i)
        if self.debug_info and first == len(self.layers) - 1 and end == 0:
            debug.log_norms(self)

    def compute(self, index: int) -> None:
        """Compute one layer."""
        layer, bottoms, tops = self.layers[index], self._bottoms[index], self._tops[index]
        layer.prepare(bottoms, tops)
        layer.forward(bottoms, tops)
        self._has_run[index] = True

    # For replaying both passes (``replay.py``).

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to know of each layer's passes."""
        calls = (
            self.before_forward_callbacks,
            self.after_forward_callbacks,
            self.before_backward_callbacks,
            self.after_backward_callbacks,
        )
        return self.debug_info or any(calls)

    def memories(self) -> list[Memory]:
        """Return what holds the values and the gradients of all blobs and parameters; some of it more than once."""
        params = (blob for layer in self.layers for blob in layer.blobs)
        return [memory for blob in (*self._wiring.blobs, *params) for memory in blob.memories]

    def parameter_memories(self) -> list[Memory]:
        """Return what holds the parameters' values."""
        return [blob.memories[0] for layer in self.layers for blob in layer.blobs]

    def start_passes(self, done: Collection[int]) -> torch.Tensor:
        """Compute forward, but for the layers that are ``done``, and backward; return the loss without waiting."""
        loss = self._compute_layers(i for i in range(len(self.layers)) if i not in done)
        self.run_backward()
        return torch.zeros(()) if loss is None else loss

    def note_forward(self) -> None:
        """Note that every layer has what its backward needs."""
        self._has_run = [True] * len(self.layers)

    def reshape(self) -> None:
        """Reshape all blobs after the inputs were reshaped, without computing."""
        for layer, bottoms, tops in zip(self.layers, self._bottoms, self._tops, strict=True):
            layer.prepare(bottoms, tops)

    def clear_param_diffs(self) -> None:
        """Set the gradients of all parameters to zero."""
        for param in self.learnable:
            param.blob.clear_diff()

    # Building.

    def _add_layer(self, param: LayerParameter, blob_needs: dict[int, bool]) -> None:
        if not param.HasField("phase"):
            param.phase = self.phase
        if param.propagate_down and len(param.propagate_down) != len(param.bottom):
            raise ConfigError(
                f"layer {param.name!r} ({param.type}): propagate_down must be given once per bottom or not at all; "
                f"there are {len(param.propagate_down)} for {len(param.bottom)} bottoms"
            )
        index = len(self.layers)
        with _naming(param):
            layer = layer_types.create(param)
            log.info("Creating Layer %s", param.name)
            self._wiring.add_layer(param, layer.top_count.low if layer.makes_missing_tops else 0)
            bottoms, tops = self._wiring.bottoms(index), self._wiring.tops(index)
            layer.set_up(bottoms, tops)
        self.layers.append(layer)
        self._top_values += sum(blob.count for blob in tops)
        debug.log_setup(layer, tops, self._top_values)
        self._params.add_layer(index, layer, self.layers)
        layer.param_propagate_down = _param_propagate_down(layer)
        self._needs.append(self._first_needs(index, layer, blob_needs))

    def _first_needs(self, index: int, layer: Layer, blob_needs: dict[int, bool]) -> LayerNeeds:
        """Return what the layer needs, judged by the layers before it."""
        bottom_ids, top_ids = self._wiring.bottom_ids[index], self._wiring.top_ids[index]
        from_below = [blob_needs.get(i, False) for i in bottom_ids]
        needs_backward = any(from_below) or any(layer.param_propagate_down)
        if needs_backward:
            blob_needs.update(dict.fromkeys(top_ids, True))
        names = self._wiring.names
        return LayerNeeds(
            tops=[names[i] for i in top_ids],
            bottoms=[names[i] for i in bottom_ids],
            has_loss=[bool(weight) for weight in layer.loss_weights],
            needs_backward=needs_backward,
            bottom_needs=list(layer.param.propagate_down) or from_below,
        )

    def _force_backward(self) -> None:
        for layer, needs in zip(self.layers, self._needs, strict=True):
            needs.needs_backward = True
            needs.bottom_needs = [
                needed or layer.allow_force_backward(i) for i, needed in enumerate(needs.bottom_needs)
            ]
            layer.param_propagate_down = [True] * len(layer.blobs)

    def _tell_layers(self) -> None:
        for layer, needs in zip(self.layers, self._needs, strict=True):
            layer.needs_backward = needs.needs_backward
            layer.propagate_down = needs.bottom_needs
        for layer in reversed(self.layers):
            log.info("%s %s backward computation.", layer.name, "needs" if layer.needs_backward else "does not need")

    def _checked(self, index: int, what: str) -> int:
        if not self.layers:
            raise ConfigError(
                f"net {self.name!r} has no layers; is its prototxt empty, or are they all for other phases?"
            )
        if not 0 <= index < len(self.layers):
            raise ConfigError(f"{what} {index} is not a layer of net {self.name!r}, which has {len(self.layers)}")
        return index


@contextlib.contextmanager
def _naming(param: LayerParameter) -> Iterator[None]:
    """Name the layer in an error of what it uses, and turn a lack of memory into one line."""
    name = f"layer {param.name!r}"
    try:
        yield
    except ConfigError as error:
        if name in str(error):
            raise
        raise ConfigError(f"{name} ({param.type}): {error}") from error
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"{name} ({param.type}): there is not enough memory for its parameters and results; make it smaller"
        ) from error


def _param_propagate_down(layer: Layer) -> list[bool]:
    specs = list(layer.param.param)
    return [index >= len(specs) or specs[index].lr_mult != 0 for index in range(len(layer.blobs))]
