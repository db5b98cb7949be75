"""The systems that can be simulated: what each sends, how, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from poseidon.errors import unknown_name
from poseidon.planning.packing import limit_collective


@dataclass(frozen=True)
class System:
    """How a system exchanges gradients."""

    name: str
    summary: str
    dense: Literal["none", "allreduce", "sharded", "served", "planned"] = "allreduce"
    """How full gradients travel: by collectives, through a parameter server, which may take the optimizer's step, or as
    the planner decides."""
    special: Literal["none", "planned", "factor-push"] = "none"
    """Linear and embedding units: as full gradients, as the planner decides, or factors up and the matrix down."""
    is_wait_free: bool = True
    """Exchanges start during backward, as each gradient becomes ready (DWBP)."""
    overlaps_forward: bool = False
    """The next forward waits for one unit at a time, and what it needs first goes first."""
    packing: Literal["engine", "ddp", "whole", "units"] = "engine"
    """Which gradients travel together: as in Poseidon's engine, as in torch's DDP, all of them, or none."""
    bucket_bytes: int = limit_collective(None, defers=False)
    """Maximum bytes per collective; the default of torch's and Poseidon's wrappers."""

    @property
    def has_server(self) -> bool:
        """Whether a parameter server may hold the values, so that workers can drift apart."""
        return self.dense == "sharded" or self.overlaps_forward


SYSTEMS = {
    system.name: system
    for system in (
        System("linear", "no exchange: the bound of perfect scaling", dense="none"),
        System("ring", "one allreduce after backward", is_wait_free=False, packing="whole"),
        System("ddp", "allreduce during backward, as torch's DistributedDataParallel", packing="ddp"),
        System("ps", "parameter server after backward", dense="sharded", is_wait_free=False, packing="units"),
        System("dwbp-ps", "parameter server during backward", dense="sharded", packing="units"),
        System(
            "poseidon-2017",
            "parameter server and factors, during backward",
            dense="sharded",
            special="planned",
            packing="units",
        ),
        System(
            "adam",
            "parameter server; factors up, matrices down",
            dense="sharded",
            special="factor-push",
            packing="units",
        ),
        System("poseidon", "poseidon.DistributedDataParallel", dense="planned", special="planned"),
        System(
            "distribute",
            "poseidon.distribute: into the next forward, most urgent first",
            dense="planned",
            special="planned",
            overlaps_forward=True,
            bucket_bytes=limit_collective(None, defers=True),
        ),
        System(
            "served",
            'poseidon.distribute(update="server"): owners of chunks step the optimizer and send weights',
            dense="served",
            overlaps_forward=True,
        ),
    )
}


def find_system(name: str) -> System:
    """Return a system by name."""
    if name not in SYSTEMS:
        raise unknown_name("system", name, list(SYSTEMS))
    return SYSTEMS[name]
