"""Which layers belong to a net of a given phase, level and stages."""

from __future__ import annotations

from poseidon.caffe.schema import NetParameter, Proto
from poseidon.errors import ConfigError


def filter_net(net: Proto) -> Proto:
    """Return a copy of the net without the layers whose rules its state does not meet."""
    result = NetParameter()
    result.CopyFrom(net)
    kept = [layer for layer in net.layer if _is_included(layer, net.state)]
    result.ClearField("layer")
    result.layer.extend(kept)
    return result


def _is_included(layer: Proto, state: Proto) -> bool:
    if layer.include and layer.exclude:
        raise ConfigError(f"layer {layer.name!r} has include and exclude rules; give only one kind")
    if layer.include:
        return any(meets_rule(state, rule) for rule in layer.include)
    return not any(meets_rule(state, rule) for rule in layer.exclude)


def meets_rule(state: Proto, rule: Proto) -> bool:
    """Whether a NetState satisfies every condition of a NetStateRule."""
    stages = set(state.stage)
    return (
        (not rule.HasField("phase") or rule.phase == state.phase)
        and (not rule.HasField("min_level") or state.level >= rule.min_level)
        and (not rule.HasField("max_level") or state.level <= rule.max_level)
        and stages.issuperset(rule.stage)
        and stages.isdisjoint(rule.not_stage)
    )
