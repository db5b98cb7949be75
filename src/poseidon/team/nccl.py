"""Which network NCCL uses, as far as it shows from outside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from poseidon.team.team import Team

RDMA_DEVICES = Path("/sys/class/infiniband")


def nccl_uses_sockets(team: Team) -> bool:
    """Return whether NCCL uses TCP on any worker. Collective, so that all workers get the same answer."""
    here = chooses_sockets(os.environ, has_rdma=RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()))
    return any(row[0] for row in team.gather_ints([int(here)], "the network NCCL uses"))


def chooses_sockets(environment: Mapping[str, str], has_rdma: bool) -> bool:
    """Return whether NCCL uses TCP in this environment. Pure."""
    chosen = environment.get("NCCL_NET", "")
    if chosen:
        return chosen.lower() == "socket"
    return not has_rdma or environment.get("NCCL_IB_DISABLE", "0") == "1"
