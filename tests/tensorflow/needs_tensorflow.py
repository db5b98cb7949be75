"""Marks for tests whose processes import TensorFlow; the tests' own process does not."""

from __future__ import annotations

import importlib.util

import pytest

_FOUND = importlib.util.find_spec("tensorflow")

MARKS = [
    # A folder of tests that is called so is found too, but it is no package.
    pytest.mark.skipif(_FOUND is None or _FOUND.origin is None, reason="TensorFlow is not installed"),
    pytest.mark.timeout(600),
]
