"""Which blobs each layer reads and writes, resolved while a net is built layer by layer."""

from __future__ import annotations

import logging

from poseidon.caffe.blob import Blob
from poseidon.caffe.insert_splits import unknown_bottom
from poseidon.caffe.schema import LayerParameter
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")


class Wiring:
    """The blobs of a net in order of creation, and the numbers of those each layer uses."""

    def __init__(self) -> None:
        self.blobs: list[Blob] = []
        self.names: list[str] = []
        self.bottom_ids: list[list[int]] = []
        self.top_ids: list[list[int]] = []
        self._index: dict[str, int] = {}
        self._unread: set[str] = set()

    def add_layer(self, layer: LayerParameter, least_tops: int = 0) -> None:
        """Connect the next layer; unnamed tops are added if it names fewer than ``least_tops``."""
        self.bottom_ids.append([self._bottom(layer, j) for j in range(len(layer.bottom))])
        self.top_ids.append([])
        for j in range(len(layer.top)):
            self.top_ids[-1].append(self._top(layer, j))
        for _ in range(len(layer.top), least_tops):
            log.info("%s -> (automatic)", layer.name)
            self.top_ids[-1].append(self._new_blob("(automatic)"))

    def bottoms(self, layer_index: int) -> list[Blob]:
        """Return the blobs a layer reads."""
        return [self.blobs[i] for i in self.bottom_ids[layer_index]]

    def tops(self, layer_index: int) -> list[Blob]:
        """Return the blobs a layer writes."""
        return [self.blobs[i] for i in self.top_ids[layer_index]]

    def output_ids(self) -> list[int]:
        """Return the blobs that no layer reads, sorted by name: the outputs of the net."""
        return [self._index[name] for name in sorted(self._unread)]

    def _bottom(self, layer: LayerParameter, index: int) -> int:
        name = layer.bottom[index]
        if name not in self._unread:
            raise unknown_bottom(layer, index, sorted(self._unread))
        log.info("%s <- %s", layer.name, name)
        self._unread.remove(name)
        return self._index[name]

    def _top(self, layer: LayerParameter, index: int) -> int:
        name = layer.top[index]
        if index < len(layer.bottom) and layer.bottom[index] == name:
            log.info("%s -> %s (in-place)", layer.name, name)
            self._unread.add(name)
            return self._index[name]
        if name in self._index:
            raise ConfigError(
                f"layer {layer.name!r} ({layer.type}): top {index} is {name!r}, which an earlier layer already "
                "produces; give it another name, or the name of the bottom in the same place to work in place"
            )
        log.info("%s -> %s", layer.name, name)
        self._unread.add(name)
        self._index[name] = self._new_blob(name)
        return self._index[name]

    def _new_blob(self, name: str) -> int:
        self.blobs.append(Blob())
        self.names.append(name)
        return len(self.blobs) - 1
