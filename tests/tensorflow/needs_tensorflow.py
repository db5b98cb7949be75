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

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "TF_NUM_INTRAOP_THREADS": "1"}
PRELOAD = ["tensorflow", "keras", "poseidon.tensorflow.following"]
"""How ranks are started that need TensorFlow: it is imported once, by the first test of a file."""
