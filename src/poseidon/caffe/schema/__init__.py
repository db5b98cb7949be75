"""The messages of Caffe's model format, built from tables of facts (names, numbers, types, defaults).

``schema/messages.py`` holds every message class; the common ones are here too.
"""

from __future__ import annotations

from poseidon.caffe.extras import require

require("google.protobuf")

from google.protobuf.message import Message  # noqa: E402

from poseidon.caffe.schema.messages import (  # noqa: E402
    TEST,
    TRAIN,
    BlobProto,
    Datum,
    FillerParameter,
    LayerParameter,
    NetParameter,
    NetState,
    ParamSpec,
    SolverParameter,
    SolverState,
)

__all__ = [
    "TEST",
    "TRAIN",
    "BlobProto",
    "Datum",
    "FillerParameter",
    "LayerParameter",
    "Message",
    "NetParameter",
    "NetState",
    "ParamSpec",
    "SolverParameter",
    "SolverState",
]
