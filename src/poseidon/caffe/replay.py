"""A net's passes on a GPU, recorded once as a CUDA graph and replayed.

Layer by layer, a net of a hundred small layers keeps the processor busier than the GPU. A solver alone on its GPU
records forward and backward after some iterations, and from then on one call starts all of them. The update stays
outside, since its learning rate changes.

A graph reads and writes the memory that the blobs had when it was recorded. Blobs may be given other memory at any time
(a script writes to one, a snapshot is restored), so every replay first copies what has come from elsewhere to where the
graph reads it, and then lets the blobs have the graph's results. Where anything else has changed, passes are computed
layer by layer, and then recorded anew.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from poseidon.caffe import device
from poseidon.caffe.layers.base import Layer
from poseidon.caffe.memory import Memory
from poseidon.job import settings

if TYPE_CHECKING:
    from poseidon.caffe.net import BuiltNet

log = logging.getLogger("poseidon.caffe")

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records what a function does on the device; returns what repeats it, and the tensor that the function returned."""

COMPUTED_FIRST = 3
"""Passes before the recorded one: libraries choose their kernels and take their memory in these."""
MOST_RECORDINGS = 5
"""What changes more often is computed layer by layer."""
# fmt: off
REPLAYABLE = frozenset((
    "AbsVal", "BatchNorm", "Bias", "BNLL", "Concat", "Convolution", "Crop", "Deconvolution", "Dropout", "Eltwise",
    "ELU", "EuclideanLoss", "Exp", "Flatten", "Im2col", "InnerProduct", "Log", "LRN", "MVN", "Pooling", "Power",
    "PReLU", "Reduction", "ReLU", "Reshape", "Scale", "Sigmoid", "SigmoidCrossEntropyLoss", "Silence", "Slice",
    "Softmax", "SoftmaxWithLoss", "Split", "Swish", "TanH", "Threshold", "Tile",
))
# fmt: on
"""Types of layers that keep nothing from one pass to the next outside of blobs, and never wait for the device."""


class _Place(NamedTuple):
    """What a memory held."""

    memory: Memory
    tensor: Tensor
    is_borrowed: bool


class ReplayedPasses:
    """Forward and backward of a net, replayed where that gives the same; ask for one pass after the other."""

    def __init__(self, net: BuiltNet, record: Record | None = None) -> None:
        self._net = net
        self._record = record or record_on_gpu
        self._sources = [i for i in range(len(net.layers)) if not net.bottoms_of(i)]
        """Layers that read nothing from the net: they are computed before each replay."""
        is_on_gpu = record is not None or device.active().type == "cuda"
        can_replay = all(_can_replay(layer, i in self._sources) for i, layer in enumerate(net.layers))
        self._is_off = not (is_on_gpu and can_replay and settings.CAFFE_REPLAY.read())
        self._shapes: list[tuple[int, ...]] = []
        """Of what the sources gave in the last pass."""
        self._alike = 0
        """Passes with these shapes so far."""
        self._recordings = 0
        self._graph: _Graph | None = None

    def run(self) -> float | None:
        """Do one pass and return its loss; None if the caller has to compute it layer by layer."""
        net = self._net
        if (
            (self._is_off and self._graph is None)
            or net.is_watched
            or any(param.blob.has_diff for param in net.learnable)
        ):
            return None
        if self._graph is None and not self._is_settled():
            return None
        for index in self._sources:
            net.compute(index)
        if self._graph is None:
            self._graph = self._recorded()
        if self._graph is not None and self._graph.fits():
            return self._graph.replay()
        self._graph, self._shapes = None, []
        return float(net.start_passes(self._sources))

    def _is_settled(self) -> bool:
        """Count passes of one shape; return whether there were enough."""
        shapes = [blob.shape for index in self._sources for blob in self._net.tops_of(index)]
        self._alike = self._alike + 1 if shapes == self._shapes else 0
        self._shapes = shapes
        return self._alike >= COMPUTED_FIRST

    def _recorded(self) -> _Graph | None:
        net = self._net
        self._recordings += 1
        self._is_off = self._recordings == MOST_RECORDINGS
        memories = net.memories()
        before = [_renewed(memory) for memory in memories]
        layers = [dict(vars(layer)) for layer in net.layers]
        try:
            replay, loss = self._record(lambda: net.start_passes(self._sources))
        except RuntimeError as error:
            log.info("The passes of %s cannot be recorded (%s); they are computed layer by layer.", net.name, error)
            self._give_up(before)
            return None
        after = [_held(memory) for memory in memories]
        graph = _Graph(net, memories, replay, loss)
        for memory, old, new in zip(memories, before, after, strict=True):
            if new is None:
                graph.zeros.append(memory)
            elif old is not None and old.tensor is new.tensor:
                graph.read.append(new)
            else:
                graph.written.append(new)
        kept = {id(memory) for memory in net.parameter_memories()}
        if any(id(place.memory) in kept for place in graph.written):
            # A replay would read the parameter where it was, and write it elsewhere.
            log.info("The passes of %s replace parameters; they are computed layer by layer.", net.name)
            self._give_up(before)
            return None
        for layer, old_state in zip(net.layers, layers, strict=True):
            state = {name: value for name, value in vars(layer).items() if old_state.get(name) is not value}
            graph.states.append((vars(layer), state))
        return graph

    def _give_up(self, before: list[_Place | None]) -> None:
        """Take back what recording left in the blobs: nothing has been computed."""
        self._is_off = True
        for place in before:
            if place is not None:
                place.memory.put(place.tensor, place.is_borrowed)
        self._net.clear_param_diffs()


class _Graph:
    """A recorded pass, and where it reads and writes."""

    def __init__(self, net: BuiltNet, memories: Sequence[Memory], replay: Callable[[], None], loss: Tensor) -> None:
        self.read: list[_Place] = []
        self.written: list[_Place] = []
        self.zeros: list[Memory] = []
        """Memories that nobody had written to: layers ask for that."""
        self.states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """What each layer's forward keeps for its backward: a pass that was computed since has other tensors there."""
        self._net = net
        self._memories = memories
        self._shapes = [blob.shape for blob in net.blob_list]
        self._device = device.active()
        self._replay = replay
        self._loss = loss

    def fits(self) -> bool:
        """Return whether a pass would do now what was recorded."""
        net = self._net
        return (
            device.active() == self._device
            and [blob.shape for blob in net.blob_list] == self._shapes
            and all(map(operator.is_, net.memories(), self._memories))
            and all(memory.is_zero for memory in self.zeros)
            and all(not memory.is_zero and memory.tensor().shape == tensor.shape for memory, tensor, _ in self.read)
        )

    def replay(self) -> float:
        """Repeat the pass with what the blobs hold now; return its loss."""
        for memory, tensor, is_borrowed in self.read:
            now = memory.tensor()
            if now is not tensor:
                tensor.copy_(now)
                memory.put(tensor, is_borrowed)
        self._replay()
        for place in self.written:
            place.memory.put(place.tensor, place.is_borrowed)
        for attributes, state in self.states:
            attributes.update(state)
        self._net.note_forward()
        return float(self._loss)


def _can_replay(layer: Layer, is_source: bool) -> bool:
    if is_source:
        return not layer.needs_backward or layer.type == "Parameter"
    return layer.type in REPLAYABLE


def _held(memory: Memory) -> _Place | None:
    return None if memory.is_zero else _Place(memory, memory.tensor(), memory.is_borrowed)


def _renewed(memory: Memory) -> _Place | None:
    """Give a memory another tensor of the same values: if it still has that after a pass, the pass did not write it.

    A split's result is its input, so without this it may look as if the pass had found it there.
    """
    if not memory.is_zero:
        memory.put(memory.tensor().detach(), memory.is_borrowed)
    return _held(memory)


def record_on_gpu(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record what ``work`` starts on the GPU as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Threads that read ahead may use the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = work()
    return graph.replay, loss
