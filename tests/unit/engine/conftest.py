"""The engine's tests run without torch's compiler, whose import takes as long as all of them together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture(scope="package", autouse=True)
def no_compiler() -> Iterator[None]:
    """Stand in for ``torch._dynamo``, which every optimizer imports only to keep out of it."""
    import torch

    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    stub = ModuleType(name)
    stub.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    stub.graph_break = lambda: None  # type: ignore[attr-defined]
    sys.modules[name] = torch._dynamo = stub
    yield
    del sys.modules[name], torch._dynamo
