"""Turn the oldest layers (lower-case type names, all settings in one message) into V1 layers."""

from __future__ import annotations

import logging
from typing import Any

from poseidon.caffe.schema import NetParameter
from poseidon.caffe.schema.messages import V1LayerParameter
from poseidon.errors import ConfigError, unknown_name

log = logging.getLogger("poseidon.caffe")


_TYPES = {
    "accuracy": "ACCURACY",
    "bnll": "BNLL",
    "concat": "CONCAT",
    "conv": "CONVOLUTION",
    "data": "DATA",
    "dropout": "DROPOUT",
    "euclidean_loss": "EUCLIDEAN_LOSS",
    "flatten": "FLATTEN",
    "hdf5_data": "HDF5_DATA",
    "hdf5_output": "HDF5_OUTPUT",
    "im2col": "IM2COL",
    "images": "IMAGE_DATA",
    "infogain_loss": "INFOGAIN_LOSS",
    "innerproduct": "INNER_PRODUCT",
    "lrn": "LRN",
    "multinomial_logistic_loss": "MULTINOMIAL_LOGISTIC_LOSS",
    "pool": "POOLING",
    "relu": "RELU",
    "sigmoid": "SIGMOID",
    "softmax": "SOFTMAX",
    "softmax_loss": "SOFTMAX_LOSS",
    "split": "SPLIT",
    "tanh": "TANH",
    "window_data": "WINDOW_DATA",
}

_SETTINGS = {
    "conv": "convolution_param",
    "innerproduct": "inner_product_param",
    "pool": "pooling_param",
    "dropout": "dropout_param",
    "lrn": "lrn_param",
    "data": "data_param",
    "hdf5_data": "hdf5_data_param",
    "images": "image_data_param",
    "window_data": "window_data_param",
    "infogain_loss": "infogain_loss_param",
    "concat": "concat_param",
}

# Old field -> (name in the layer's settings, types that take it).
_MOVES: dict[str, tuple[str, tuple[str, ...]]] = {
    "num_output": ("num_output", ("conv", "innerproduct")),
    "biasterm": ("bias_term", ("conv", "innerproduct")),
    "weight_filler": ("weight_filler", ("conv", "innerproduct")),
    "bias_filler": ("bias_filler", ("conv", "innerproduct")),
    "pad": ("pad", ("conv", "pool")),
    "kernelsize": ("kernel_size", ("conv", "pool")),
    "group": ("group", ("conv",)),
    "stride": ("stride", ("conv", "pool")),
    "pool": ("pool", ("pool",)),
    "dropout_ratio": ("dropout_ratio", ("dropout",)),
    "local_size": ("local_size", ("lrn",)),
    "alpha": ("alpha", ("lrn",)),
    "beta": ("beta", ("lrn",)),
    "k": ("k", ("lrn",)),
    "source": ("source", ("data", "hdf5_data", "images", "window_data", "infogain_loss")),
    "batchsize": ("batch_size", ("data", "hdf5_data", "images", "window_data")),
    "rand_skip": ("rand_skip", ("data", "images")),
    "shuffle_images": ("shuffle", ("images",)),
    "new_height": ("new_height", ("images",)),
    "new_width": ("new_width", ("images",)),
    "concat_dim": ("concat_dim", ("concat",)),
    "det_fg_threshold": ("fg_threshold", ("window_data",)),
    "det_bg_threshold": ("bg_threshold", ("window_data",)),
    "det_fg_fraction": ("fg_fraction", ("window_data",)),
    "det_context_pad": ("context_pad", ("window_data",)),
    "det_crop_mode": ("crop_mode", ("window_data",)),
}
_TRANSFORMS = {"scale": "scale", "meanfile": "mean_file", "cropsize": "crop_size", "mirror": "mirror"}


def upgrade_v0_net(net: NetParameter, origin: str) -> NetParameter:
    """Return the net with V1 layers; padding layers are folded into the layer that reads them."""
    result = NetParameter(input=net.input, input_dim=net.input_dim)
    for name in ("name", "force_backward"):
        if net.HasField(name):
            setattr(result, name, getattr(net, name))
    for layer in _without_padding(net, origin):
        result.layers.add().CopyFrom(_upgrade_layer(layer))
    return result


def _without_padding(net: NetParameter, origin: str) -> list[V1LayerParameter]:
    """Drop ``padding`` layers; the convolution or pooling that reads one takes over its amount and its input."""
    producer: dict[str, V1LayerParameter | None] = dict.fromkeys(net.input)
    kept: list[V1LayerParameter] = []
    for original in net.layers:
        layer = V1LayerParameter()
        layer.CopyFrom(original)
        for index, blob in enumerate(layer.bottom):
            if blob not in producer:
                raise ConfigError(f"{origin}: layer {layer.layer.name!r} reads unknown blob {blob!r}")
            source = producer[blob]
            if source is not None and source.layer.type == "padding":
                _fold_padding(layer, index, source, origin)
        if layer.layer.type != "padding":
            kept.append(layer)
        for blob in layer.top:
            producer[blob] = original
    return kept


def _fold_padding(layer: V1LayerParameter, index: int, padding: V1LayerParameter, origin: str) -> None:
    single = len(layer.bottom) == 1 and len(padding.bottom) == 1 and len(padding.top) == 1
    if layer.layer.type not in ("conv", "pool") or not single:
        raise ConfigError(
            f"{origin}: padding layer {padding.layer.name!r} feeds layer {layer.layer.name!r} of type "
            f"{layer.layer.type!r}; only a conv or pool layer with a single input can take its padding"
        )
    layer.layer.pad = padding.layer.pad
    layer.bottom[index] = padding.bottom[0]


def _upgrade_layer(connection: V1LayerParameter) -> V1LayerParameter:
    old = connection.layer
    new = V1LayerParameter(bottom=connection.bottom, top=connection.top)
    if not connection.HasField("layer"):
        return new
    if old.HasField("name"):
        new.name = old.name
    if old.HasField("type"):
        if old.type not in _TYPES:
            raise unknown_name("layer type (V0 format)", old.type, list(_TYPES))
        new.type = V1LayerParameter.LayerType.Value(_TYPES[old.type])
    for name in ("blobs", "blobs_lr", "weight_decay"):
        getattr(new, name).extend(getattr(old, name))
    for field, value in old.ListFields():
        _move_setting(new, old.type, field.name, value)
    return new


def _move_setting(new: V1LayerParameter, old_type: str, name: str, value: Any) -> None:
    if name in _TRANSFORMS:
        setattr(new.transform_param, _TRANSFORMS[name], value)
    elif name == "hdf5_output_param" and old_type == "hdf5_output":
        new.hdf5_output_param.CopyFrom(value)
    elif name in _MOVES and old_type in _MOVES[name][1]:
        settings = getattr(new, _SETTINGS[old_type])
        target = _MOVES[name][0]
        field = settings.DESCRIPTOR.fields_by_name[target]
        if field.message_type is not None:
            getattr(settings, target).CopyFrom(value)
        elif hasattr(getattr(settings, target), "append"):
            getattr(settings, target).append(value)
        else:
            setattr(settings, target, value)
    elif name not in ("name", "type", "blobs", "blobs_lr", "weight_decay"):
        log.error("Unknown parameter %s for layer type %s", name, old_type)
