"""Whether the workers' devices can pack gradients (``server/packing.py``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec

from poseidon.team.team import Team
from poseidon.wire.settings import WireSettings


def can_pack(environment: Mapping[str, str] = os.environ) -> bool:
    """Say whether CUDA devices of this machine are asked to pack, and find what they need for it."""
    return WireSettings.from_environment(environment).pack and find_spec("triton") is not None


def all_can_pack(team: Team) -> bool:
    """Say the same of all workers. Collective, so that all come to one answer."""
    return all(row[0] for row in team.gather_ints([int(can_pack())], "who can pack gradients"))
