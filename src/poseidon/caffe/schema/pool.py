"""Descriptors and classes of Caffe's messages.

They have their own pool, so a program may also load another copy of Caffe's schema.
"""

from __future__ import annotations

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from poseidon.caffe.schema import core, layer_parameters, legacy
from poseidon.caffe.schema.table import build_file
from poseidon.errors import unknown_name

SCHEMA = build_file("caffe.proto", "caffe", [core.TABLE, layer_parameters.TABLE, legacy.TABLE])
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(SCHEMA)

FILE: FileDescriptor = _POOL.FindFileByName("caffe.proto")
_CLASSES: dict[str, type[Message]] = {
    name: message_factory.GetMessageClass(descriptor) for name, descriptor in FILE.message_types_by_name.items()
}


def message(name: str) -> type[Message]:
    """Return the class of the message called ``name``."""
    if name not in _CLASSES:
        raise unknown_name("message of Caffe's format", name, list(_CLASSES))
    return _CLASSES[name]


def message_names() -> list[str]:
    """Return the names of all messages, in the order of the tables."""
    return list(_CLASSES)
