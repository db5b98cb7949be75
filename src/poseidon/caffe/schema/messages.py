"""Every message and enum of Caffe's format by name; type checkers read their fields from ``messages.pyi``."""

from __future__ import annotations

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from poseidon.caffe.schema.pool import FILE, message, message_names

_NAMES: dict[str, object] = {name: message(name) for name in message_names()}
for _enum in FILE.enum_types_by_name.values():
    _NAMES[_enum.name] = EnumTypeWrapper(_enum)
    _NAMES.update({value.name: value.number for value in _enum.values})

globals().update(_NAMES)
__all__ = sorted(_NAMES)
