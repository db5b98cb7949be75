"""Which layers belong to a net of a given phase, level and stages."""

from __future__ import annotations

import logging

from poseidon.caffe.schema import LayerParameter, NetParameter, NetState
from poseidon.caffe.schema.messages import NetStateRule
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")


def filter_net(net: NetParameter) -> NetParameter:
    """Return a copy of the net without the layers whose rules its state does not meet."""
    result = NetParameter()
    result.CopyFrom(net)
    kept = [layer for layer in net.layer if _is_included(layer, net.state)]
    result.ClearField("layer")
    result.layer.extend(kept)
    return result


def _is_included(layer: LayerParameter, state: NetState) -> bool:
    if layer.include and layer.exclude:
        raise ConfigError(f"layer {layer.name!r} has include and exclude rules; give only one kind")
    if layer.include:
        return any(_meets(state, rule, layer.name) for rule in layer.include)
    return not any(_meets(state, rule, layer.name) for rule in layer.exclude)


def _meets(state: NetState, rule: NetStateRule, layer_name: str) -> bool:
    reason = broken_condition(state, rule)
    if reason is not None:
        log.info("The NetState %s specified by a rule in layer %s", reason, layer_name)
    return reason is None


def broken_condition(state: NetState, rule: NetStateRule) -> str | None:
    """Return the first condition of a NetStateRule that a NetState does not meet, in Caffe's words, or None."""
    if rule.HasField("phase") and rule.phase != state.phase:
        return f"phase ({state.phase}) differed from the phase ({rule.phase})"
    if rule.HasField("min_level") and state.level < rule.min_level:
        return f"level ({state.level}) is above the min_level ({rule.min_level})"
    if rule.HasField("max_level") and state.level > rule.max_level:
        return f"level ({state.level}) is above the max_level ({rule.max_level})"
    for stage in rule.stage:
        if stage not in state.stage:
            return f"did not contain stage '{stage}'"
    for stage in rule.not_stage:
        if stage in state.stage:
            return f"contained a not_stage '{stage}'"
    return None
