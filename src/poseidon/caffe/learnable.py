"""The parameters of a net: the owner of each, the layers that share it, and its multipliers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from poseidon.caffe.blob import Blob
from poseidon.caffe.layers.base import Layer
from poseidon.caffe.schema import ParamSpec
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")


@dataclass
class LearnableParam:
    """One learned parameter and every place that uses it."""

    blob: Blob
    layer_index: int
    """Layer that owns it."""
    param_index: int
    """Its number in that layer."""
    display_name: str
    lr_mult: float
    decay_mult: float
    users: list[tuple[int, int]] = field(default_factory=list)
    """(layer, number) of the owner and of every layer that shares it."""
    states_lr: bool = False
    states_decay: bool = False

    @property
    def ready_layer(self) -> int:
        """The layer whose backward step completes the gradient: the lowest user."""
        return min(layer for layer, _ in self.users)


class ParamTable:
    """All parameters of a net in order; shared ones point to their owner."""

    def __init__(self) -> None:
        self.learnable: list[LearnableParam] = []
        self._by_place: dict[tuple[int, int], LearnableParam] = {}
        self._by_name: dict[str, LearnableParam] = {}

    def add_layer(self, layer_index: int, layer: Layer, owners: list[Layer]) -> None:
        """Add the parameters of the next layer; ``owners`` are the layers so far."""
        if len(layer.param.param) > len(layer.blobs):
            raise layer.error(f"has {len(layer.blobs)} parameters but {len(layer.param.param)} param entries")
        for index, blob in enumerate(layer.blobs):
            spec = layer.param.param[index] if index < len(layer.param.param) else ParamSpec()
            owner = self._by_name.get(spec.name) if spec.name else None
            if owner is None:
                self._add_owner(layer_index, index, blob, spec)
            else:
                self._add_user(owner, owners[owner.layer_index], layer_index, layer, index, spec)

    def at(self, layer_index: int, param_index: int) -> LearnableParam:
        """Return a layer's parameter, or the one it shares."""
        return self._by_place[layer_index, param_index]

    def is_owner(self, layer_index: int, param_index: int) -> bool:
        """Whether a layer's parameter is its own, not one shared from an earlier layer."""
        owner = self._by_place[layer_index, param_index]
        return (owner.layer_index, owner.param_index) == (layer_index, param_index)

    def _add_owner(self, layer_index: int, index: int, blob: Blob, spec: ParamSpec) -> None:
        owner = LearnableParam(
            blob=blob,
            layer_index=layer_index,
            param_index=index,
            display_name=spec.name or str(index),
            lr_mult=spec.lr_mult,
            decay_mult=spec.decay_mult,
            users=[(layer_index, index)],
            states_lr=spec.HasField("lr_mult"),
            states_decay=spec.HasField("decay_mult"),
        )
        self.learnable.append(owner)
        self._by_place[layer_index, index] = owner
        if spec.name:
            self._by_name[spec.name] = owner

    def _add_user(
        self, owner: LearnableParam, owner_layer: Layer, layer_index: int, layer: Layer, index: int, spec: ParamSpec
    ) -> None:
        log.info(
            "Sharing parameters '%s' owned by layer '%s', param index %d",
            spec.name,
            owner_layer.name,
            owner.param_index,
        )
        blob = layer.blobs[index]
        is_permissive = spec.share_mode == ParamSpec.PERMISSIVE
        if (blob.count != owner.blob.count) if is_permissive else (blob.shape != owner.blob.shape):
            raise layer.error(
                f"cannot share param {spec.name!r} owned by layer {owner_layer.name!r}: the owner has shape "
                f"{owner.blob.shape}, this layer needs {blob.shape}"
                + ("" if is_permissive else " (share_mode: PERMISSIVE would compare the counts only)")
            )
        _merge_multiplier(owner, "lr_mult", "states_lr", spec, layer)
        _merge_multiplier(owner, "decay_mult", "states_decay", spec, layer)
        owner.users.append((layer_index, index))
        self._by_place[layer_index, index] = owner
        blob.share_data(owner.blob)
        blob.share_diff(owner.blob)


def _merge_multiplier(owner: LearnableParam, name: str, stated: str, spec: ParamSpec, layer: Layer) -> None:
    """Take a multiplier from a sharing layer; layers that set one must agree."""
    if not spec.HasField(name):
        return
    value = getattr(spec, name)
    if getattr(owner, stated) and getattr(owner, name) != value:
        raise ConfigError(
            f"layer {layer.name!r}: shared param {spec.name!r} has {name} {value}, "
            f"its owner has {getattr(owner, name)}; set it once, or to the same value"
        )
    setattr(owner, stated, True)
    setattr(owner, name, value)
