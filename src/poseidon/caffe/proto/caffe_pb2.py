"""Caffe's messages and enums under the name that pycaffe's users import."""

from __future__ import annotations

from poseidon.caffe.schema.messages import *  # noqa: F403
from poseidon.caffe.schema.pool import FILE as DESCRIPTOR  # noqa: F401
