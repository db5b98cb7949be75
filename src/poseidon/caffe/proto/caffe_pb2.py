"""Caffe's messages and enums under the name that pycaffe's users import."""

from __future__ import annotations

from typing import Any

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from poseidon.caffe import schema

DESCRIPTOR = schema.FILE


def _exports() -> dict[str, Any]:
    names: dict[str, Any] = {name: schema.message(name) for name in schema.message_names()}
    for enum in schema.FILE.enum_types_by_name.values():
        names[enum.name] = EnumTypeWrapper(enum)
        names.update({value.name: value.number for value in enum.values})
    return names


_NAMES = _exports()
globals().update(_NAMES)
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no message or enum value {name!r}")
