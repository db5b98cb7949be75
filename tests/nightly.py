"""How much runs of what is heavy by nature: a sample in the suite, all of it under ``scripts/nightly``.

This is the one place that reads ``POSEIDON_NIGHTLY``.
"""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

Amount = TypeVar("Amount")

IS_NIGHT = os.environ.get("POSEIDON_NIGHTLY", "") not in ("", "0")

only = pytest.mark.skipif(not IS_NIGHT, reason="heavy; scripts/nightly runs it")
"""Marks what has a sample of its kind in the suite."""


def amount(sample: Amount, night: Amount) -> Amount:
    """Return how much to do: the sample, or everything at night."""
    return night if IS_NIGHT else sample
