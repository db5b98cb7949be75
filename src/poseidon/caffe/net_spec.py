"""Write nets in Python instead of prototxt: ``L.Convolution(n.data, num_output=20, kernel_size=5)``.

``layers`` turns calls into a graph of ``Function`` (one layer) and ``Top`` (one of its results), ``NetSpec`` names the
tops, ``to_proto`` turns the graph into a NetParameter. No net is built, so any layer type may be named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf.message import Message

from poseidon.caffe.schema import LayerParameter, NetParameter
from poseidon.caffe.schema.pool import message, message_names
from poseidon.errors import ConfigError, unknown_name

_SETTINGS = "_param"


def param_name_dict() -> dict[str, str]:
    """Return, for each layer type with its own settings, their name in LayerParameter without ``_param``."""
    return {
        field.message_type.name.removesuffix("Parameter"): field.name.removesuffix(_SETTINGS)
        for field in LayerParameter.DESCRIPTOR.fields
        if field.message_type is not None and field.name.endswith(_SETTINGS)
    }


_PARAM_NAMES = param_name_dict()


def assign_proto(proto: Message, name: str, value: Any) -> None:
    """Set a field from Python values: dicts become messages, lists (or one value) repeated fields."""
    if name not in proto.DESCRIPTOR.fields_by_name:
        raise AttributeError(f"{proto.DESCRIPTOR.name} has no field {name!r}")
    try:
        if hasattr(getattr(proto, name), "extend"):
            values = list(value) if _is_sequence(value) else [value]
            for item in values:
                _append(getattr(proto, name), item)
        elif isinstance(value, (Mapping, Message)):
            _merge(getattr(proto, name), value)
        else:
            setattr(proto, name, _plain(value))
    except TypeError as error:
        raise TypeError(f"{proto.DESCRIPTOR.name}.{name} cannot be {value!r}: {error}") from None


def _append(container: Any, item: Any) -> None:
    if isinstance(item, (Mapping, Message)):
        _merge(container.add(), item)
    else:
        container.append(_plain(item))


def _merge(target: Message, value: Mapping[str, Any] | Message) -> None:
    if isinstance(value, Message):
        target.MergeFrom(value)
        return
    target.SetInParent()
    for key, item in value.items():
        assign_proto(target, key, item)


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, (str, bytes, Mapping, Message))


def _plain(value: Any) -> Any:
    """Return numpy's scalars as Python's, which protobuf requires."""
    return value.item() if hasattr(value, "item") else value


class Top:
    """One result of a layer, which other layers take as their input."""

    def __init__(self, fn: Function, n: int) -> None:
        self.fn = fn
        self.n = n

    def to_proto(self) -> NetParameter:
        """Return a net of the layers that this result needs."""
        return to_proto(self)

    def _to_proto(self, scribe: _Scribe) -> LayerParameter:
        return scribe.layer(self.fn)


class Function:
    """One layer: its type, the tops it reads and its settings."""

    def __init__(self, type_name: str, inputs: tuple[Top, ...], params: dict[str, Any]) -> None:
        for index, top in enumerate(inputs):
            if not isinstance(top, Top):
                raise TypeError(f"{type_name} input {index} is not a Top (type is {type(top)})")
        self.type_name = type_name
        self.inputs = inputs
        self.params = dict(params)
        self.ntop: int = self.params.pop("ntop", 1)
        self.in_place: bool = self.params.pop("in_place", False)
        self.tops = tuple(Top(self, n) for n in range(self.ntop))

    def to_proto(self) -> NetParameter:
        """Return a net of this layer and those it needs."""
        return to_proto(self)

    def _to_proto(self, scribe: _Scribe) -> LayerParameter:
        return scribe.layer(self)

    def settings(self, layer: LayerParameter) -> None:
        """Write the settings into a LayerParameter: into the type's own message if it has the field."""
        own = _PARAM_NAMES.get(self.type_name)
        for key, value in self.params.items():
            target = layer
            if own is not None and not key.endswith("param"):
                settings = getattr(layer, own + _SETTINGS)
                target = settings if key in settings.DESCRIPTOR.fields_by_name else layer
            assign_proto(target, key, value)


class _Scribe:
    """Writes functions as layers, each after its inputs, under given or generated names."""

    def __init__(self, names: dict[Top | Function, str]) -> None:
        self._names = names
        self._made_up: Counter[str] = Counter()
        self._layers: dict[Function, LayerParameter] = {}

    def layer(self, fn: Function) -> LayerParameter:
        """Return the LayerParameter of a function; the first call writes it."""
        for pending in _in_order(fn, self._layers):
            self._layers[pending] = self._write(pending)
        return self._layers[fn]

    def net(self) -> NetParameter:
        """Return everything written so far."""
        result = NetParameter()
        result.layer.extend(self._layers.values())
        return result

    def _write(self, fn: Function) -> LayerParameter:
        layer = LayerParameter(type=fn.type_name)
        layer.bottom.extend([self._layers[top.fn].top[top.n] for top in fn.inputs])
        if fn.in_place:
            layer.top.extend(layer.bottom)
        else:
            layer.top.extend([self._name(top, fn.type_name) for top in fn.tops])
        layer.name = self._names[fn] if fn in self._names else self._name(fn.tops[0] if fn.tops else fn, fn.type_name)
        try:
            fn.settings(layer)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"layer {layer.name!r} ({fn.type_name}): {error}") from error
        return layer

    def _name(self, item: Top | Function, type_name: str) -> str:
        if item not in self._names:
            self._made_up[type_name] += 1
            self._names[item] = f"{type_name}{self._made_up[type_name]}"
        return self._names[item]


def _in_order(fn: Function, done: Mapping[Function, LayerParameter]) -> Iterator[Function]:
    """Yield the ancestors of ``fn``, inputs first, then ``fn``; a loop, not recursion, for nets of any depth."""
    waiting = [(fn, iter(fn.inputs))]
    while waiting:
        current, inputs = waiting[-1]
        needed = next((top.fn for top in inputs if top.fn not in done), None)
        if needed is not None:
            waiting.append((needed, iter(needed.inputs)))
            continue
        waiting.pop()
        if current not in done:
            yield current


def to_proto(*tops: Top | Function) -> NetParameter:
    """Return a NetParameter of all layers that the given tops need, with names generated from their types."""
    scribe = _Scribe({})
    for top in tops:
        top._to_proto(scribe)
    return scribe.net()


class NetSpec:
    """A net under construction: a top assigned as an attribute (or item) takes its name."""

    tops: dict[str, Any]

    def __init__(self) -> None:
        super().__setattr__("tops", {})

    def __setattr__(self, name: str, value: Any) -> None:
        self.tops[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return self.tops[name]
        except KeyError:
            raise AttributeError(f"the net spec has no top {name!r}; it has: {', '.join(self.tops)}") from None

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __setitem__(self, key: str, value: Any) -> None:
        self.tops[key] = value

    def __getitem__(self, item: str) -> Any:
        return self.tops[item]

    def __delitem__(self, name: str) -> None:
        del self.tops[name]

    def to_proto(self) -> NetParameter:
        """Return the NetParameter of everything assigned so far."""
        for name, item in self.tops.items():
            if not isinstance(item, (Top, Function)):
                raise ConfigError(f"net spec: {name!r} is not a layer's result but {type(item).__name__}")
        scribe = _Scribe({item: name for name, item in self.tops.items()})
        for item in self.tops.values():
            item._to_proto(scribe)
        return scribe.net()


class Layers:
    """Every attribute is a function that makes a layer of that type from tops and settings."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def layer_fn(*args: Top, **kwargs: Any) -> Any:
            fn = Function(name, args, kwargs)
            if fn.ntop == 0:
                return fn
            return fn.tops[0] if fn.ntop == 1 else fn.tops

        return layer_fn


class Parameters:
    """The constants of each layer type's settings: ``params.Pooling.MAX``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{name}Parameter" not in message_names():
            known = [known.removesuffix("Parameter") for known in message_names() if known.endswith("Parameter")]
            raise AttributeError(str(unknown_name("settings", name, known)))
        return message(f"{name}Parameter")


layers = Layers()
params = Parameters()
