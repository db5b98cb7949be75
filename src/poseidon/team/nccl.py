"""What NCCL sends over, as far as that can be seen from outside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from poseidon.team.team import Team

RDMA_DEVICES = Path("/sys/class/infiniband")


def nccl_uses_sockets(team: Team) -> bool:
    """Say whether NCCL goes by TCP on any worker. Collective in the team, so that all come to one answer."""
    here = chooses_sockets(os.environ, has_rdma=RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()))
    return any(row[0] for row in team.gather_ints([int(here)], "what NCCL sends over"))


def chooses_sockets(environment: Mapping[str, str], has_rdma: bool) -> bool:
    """Say whether NCCL would go by TCP in this environment. Pure."""
    chosen = environment.get("NCCL_NET", "")
    if chosen:
        return chosen.lower() == "socket"
    return not has_rdma or environment.get("NCCL_IB_DISABLE", "0") == "1"
