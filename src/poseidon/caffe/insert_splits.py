"""Insert Split layers, under Caffe's names, so that every reader of a blob has its own copy."""

from __future__ import annotations

from collections import Counter

from poseidon.caffe.schema import LayerParameter, NetParameter
from poseidon.errors import ConfigError

_Top = tuple[int, int]  # number of the layer, number of the top in it


def insert_splits(net: NetParameter) -> NetParameter:
    """Return the net with a Split layer after each top that is read more than once.

    A loss weight counts as one more reader: it moves to the first top of the Split, so that gradients add up.
    """
    sources, readers = _trace(net)
    weights = {
        (i, j): weight
        for i, layer in enumerate(net.layer)
        for j, weight in enumerate(layer.loss_weight[: len(layer.top)])
        if weight
    }
    readers.update(weights.keys())
    result = NetParameter()
    result.CopyFrom(net)
    result.ClearField("layer")
    used: Counter[_Top] = Counter()
    for i, original in enumerate(net.layer):
        layer = result.layer.add()
        layer.CopyFrom(original)
        for j, blob in enumerate(original.bottom):
            top = sources[i, j]
            if readers[top] > 1:
                layer.bottom[j] = f"{_split_name(net.layer[top[0]].name, blob, top[1])}_{used[top]}"
                used[top] += 1
        for j, blob in enumerate(original.top):
            if readers[i, j] > 1:
                weight = weights.get((i, j), 0.0)
                result.layer.append(_split_layer(original.name, blob, j, readers[i, j], weight))
                if weight:
                    layer.ClearField("loss_weight")
                    used[i, j] += 1
    return result


def _trace(net: NetParameter) -> tuple[dict[_Top, _Top], Counter[_Top]]:
    """Return where each bottom (layer, index) comes from, and how often each top is read."""
    latest: dict[str, _Top] = {}
    sources: dict[_Top, _Top] = {}
    readers: Counter[_Top] = Counter()
    for i, layer in enumerate(net.layer):
        for j, blob in enumerate(layer.bottom):
            if blob not in latest:
                raise unknown_bottom(layer, j, list(latest))
            sources[i, j] = latest[blob]
            readers[latest[blob]] += 1
        for j, blob in enumerate(layer.top):
            latest[blob] = (i, j)
    return sources, readers


def _split_layer(layer_name: str, blob: str, index: int, count: int, loss_weight: float) -> LayerParameter:
    name = _split_name(layer_name, blob, index)
    layer = LayerParameter(name=name, type="Split", bottom=[blob], top=[f"{name}_{k}" for k in range(count)])
    if loss_weight:
        layer.loss_weight.extend([loss_weight] + [0.0] * (count - 1))
    return layer


def _split_name(layer_name: str, blob: str, index: int) -> str:
    return f"{blob}_{layer_name}_{index}_split"


def unknown_bottom(layer: LayerParameter, index: int, known: list[str]) -> ConfigError:
    """Return the error for a bottom that no earlier layer produces."""
    return ConfigError(
        f"layer {layer.name!r} ({layer.type}): bottom {index} is {layer.bottom[index]!r}, which no earlier layer "
        f"produces; blobs known here: {', '.join(known) or 'none'}"
    )
