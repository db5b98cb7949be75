"""The messages of Caffe's model format, built from tables of facts (names, numbers, types, defaults).

``message("NetParameter")`` gives the class. The classes live in a pool of their own, so a program may load another
copy of Caffe's schema beside this one.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from poseidon.caffe.extras import require

require("google.protobuf")

from google.protobuf import descriptor_pool, message_factory  # noqa: E402
from google.protobuf.descriptor import FileDescriptor  # noqa: E402

from poseidon.caffe.schema import core, layer_parameters, legacy  # noqa: E402
from poseidon.caffe.schema.table import build_file  # noqa: E402
from poseidon.errors import unknown_name  # noqa: E402

Proto: TypeAlias = Any
"""A message of this schema. Its fields are made from tables at run time, so a type checker cannot know them."""

_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(build_file("caffe.proto", "caffe", [core.TABLE, layer_parameters.TABLE, legacy.TABLE]))

FILE: FileDescriptor = _POOL.FindFileByName("caffe.proto")
_CLASSES: dict[str, Any] = {
    name: message_factory.GetMessageClass(descriptor) for name, descriptor in FILE.message_types_by_name.items()
}


def message(name: str) -> Any:
    """Return the class of the message called ``name``."""
    if name not in _CLASSES:
        raise unknown_name("message of Caffe's format", name, list(_CLASSES))
    return _CLASSES[name]


def message_names() -> list[str]:
    """Return the names of all messages, in the order of the tables."""
    return list(_CLASSES)


BlobProto = message("BlobProto")
BlobProtoVector = message("BlobProtoVector")
Datum = message("Datum")
FillerParameter = message("FillerParameter")
LayerParameter = message("LayerParameter")
NetParameter = message("NetParameter")
NetState = message("NetState")
ParamSpec = message("ParamSpec")
SolverParameter = message("SolverParameter")
SolverState = message("SolverState")

TRAIN: int = FILE.enum_types_by_name["Phase"].values_by_name["TRAIN"].number
TEST: int = FILE.enum_types_by_name["Phase"].values_by_name["TEST"].number
