"""A cluster in a box: emulated machines on shaped links, paced compute, and the benchmark that uses them.

Names are loaded when first used: the lab's own helper process must start quickly and without PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Job", "Lab", "Traffic", "paced"]

_HOME = {
    "Job": "poseidon.lab.job",
    "Lab": "poseidon.lab.cluster",
    "Traffic": "poseidon.lab.network",
    "paced": "poseidon.lab.pace",
}

if TYPE_CHECKING:
    from poseidon.lab.cluster import Lab
    from poseidon.lab.job import Job
    from poseidon.lab.network import Traffic
    from poseidon.lab.pace import paced


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'poseidon.lab' has no attribute {name!r}")
