"""Which nets a solver trains and tests: its many ways to name them, resolved to one NetParameter per net."""

from __future__ import annotations

from typing import NamedTuple

from poseidon.caffe.schema import TEST, TRAIN, NetParameter, NetState, SolverParameter
from poseidon.caffe.upgrade import read_net, upgrade_net
from poseidon.errors import ConfigError

_TRAIN_FIELDS = ("net", "net_param", "train_net", "train_net_param")


class NetSource(NamedTuple):
    """A net and its origin, with its state filled in."""

    what: str
    """The origin in the words of Caffe's log."""
    origin: str
    """File or field, for errors."""
    param: NetParameter


def train_source(param: SolverParameter) -> NetSource:
    """Return the net to train; exactly one field may name it."""
    given = [name for name in _TRAIN_FIELDS if param.HasField(name)]
    if len(given) != 1:
        raise ConfigError(
            f"the solver names {'no training net' if not given else ' and '.join(given)}; "
            f"give exactly one of: {', '.join(_TRAIN_FIELDS)}"
        )
    (field,) = given
    source = _load(param, field)
    states = [param.train_state] if param.HasField("train_state") else []
    return _with_state(source, TRAIN, states)


def test_sources(param: SolverParameter) -> list[NetSource]:
    """Return the nets to test, in Caffe's order: test_net_param, test_net, then the common net for the rest."""
    sources = [_given("test_net_param", net) for net in param.test_net_param]
    sources += [_read("test_net file", path) for path in param.test_net]
    generic = [name for name in ("net", "net_param") if param.HasField(name)]
    count = len(param.test_iter)
    if count < len(sources) or (count > len(sources) and not generic):
        raise ConfigError(
            f"test_iter is given {count} times for {len(sources)} test nets; give it once for each"
            + (", and more often only for tests of the common net" if generic else "")
        )
    sources += [_load(param, generic[0]) for _ in range(count - len(sources))]
    if param.test_state and len(param.test_state) != len(sources):
        raise ConfigError(
            f"test_state is given {len(param.test_state)} times for {len(sources)} test nets; "
            "give it once for each or not at all"
        )
    if sources and param.test_interval <= 0:
        raise ConfigError(f"test_interval is {param.test_interval}; with test nets it must be positive")
    return [
        _with_state(source, TEST, [param.test_state[i]] if param.test_state else []) for i, source in enumerate(sources)
    ]


def _load(param: SolverParameter, field: str) -> NetSource:
    value = getattr(param, field)
    return _given(field, value) if field.endswith("_param") else _read(f"{field} file", value)


def _read(what: str, path: str) -> NetSource:
    return NetSource(f"{what}: {path}", path, read_net(path))


def _given(field: str, net: NetParameter) -> NetSource:
    copy = type(net)()
    copy.CopyFrom(net)
    upgrade_net(copy, field)
    return NetSource(field, field, copy)


def _with_state(source: NetSource, phase: int, more: list[NetState]) -> NetSource:
    """Fill in the state: the phase, then the net's own state, then the solver's."""
    state = NetState(phase=phase)
    for addition in (source.param.state, *more):
        state.MergeFrom(addition)
    source.param.state.CopyFrom(state)
    return source
