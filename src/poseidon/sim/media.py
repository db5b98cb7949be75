"""How efficiently real transports use a wire: named constants, each with its source.

A byte costs time on the wire and work on the host. Where the two overlap (pipelined), the slower one dominates, with a
smooth transition: ``(wire^3 + host^3)^(1/3)``. Where they alternate, they add up.

The host's part was measured by summing 241 MB over 8 emulated machines (each sends 422 MB) on 16 cores, two per worker,
at two link speeds, in two or three runs (``benchmarks/wire.sh gpu``); minimum .. maximum:

=================  ==========  ==========  ===================================
ms                 10 Gbit/s   25 Gbit/s   model
=================  ==========  ==========  ===================================
the wire alone     338         135
NCCL over TCP      360 .. 390  195 .. 265  pipelined, 0.52 ns/byte: 367, 236
gloo               360 .. 439  213 .. 285  added, 0.22 ns/byte: 432, 229
the sharded sum    362 .. 382  210 .. 260  pipelined, 0.58 ns/byte: 377, 258
=================  ==========  ==========  ===================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from poseidon.errors import unknown_name

ETHERNET_PAYLOAD = 1448 / 1538
"""Share of an Ethernet link that carries data: TCP with timestamps at MTU 1500, including preamble and gap."""
LAB_PAYLOAD = 0.997
"""The same in an emulated cluster, whose shaping counts packets before they are cut to the MTU; measured there."""
CORES_MEASURED = 2.0
"""Cores per worker when the host's part was measured."""
LEAST_HOST = 0.8
"""What remains of the host's part with spare cores, when a transport's own thread cannot be parallelized further:
fitted to 2 and 4 machines on 16 cores at 25 Gbit/s."""

_CORNER = 3.0


@dataclass(frozen=True)
class Medium:
    """How a transport uses the wire and the host."""

    name: str
    host_s_per_byte: float
    """Host work per byte a machine sends (and receives)."""
    is_pipelined: bool
    """Host work overlaps with the wire; otherwise they add up."""
    message_s: float = 0.0
    """Host work for one unit's direct messages to one peer, and as much for those it receives from that peer."""
    has_trees: bool = False
    """Collectives may use trees, whose depth grows with the logarithm of the machine count."""

    def seconds_per_byte(self, wire_bytes_per_s: float, wire_share: float = 1.0) -> float:
        """Return the time of one byte on a link of this rate.

        Values shortened to ``wire_share`` of their bytes cost the host the same per value, so more per byte: measured
        with NCCL and bf16, which takes 1.1 to 1.2 ns per byte at 10 Gbit/s where fp32 takes 0.87.
        """
        wire, host = 1 / wire_bytes_per_s, self.host_s_per_byte / wire_share
        if not self.is_pipelined:
            return wire + host
        return float((wire**_CORNER + host**_CORNER) ** (1 / _CORNER))

    def hops(self, members: int) -> int:
        """Return the number of sequential messages in an allreduce."""
        ring = 2 * (members - 1)
        return min(ring, 2 * math.ceil(math.log2(members)) + 2) if self.has_trees and members > 1 else ring

    def on_cores(self, cores_per_worker: float) -> Medium:
        """Return the transport for another number of cores per worker than it was measured with."""
        shortage = CORES_MEASURED / cores_per_worker
        return replace(
            self,
            host_s_per_byte=self.host_s_per_byte * max(LEAST_HOST, shortage),
            message_s=self.message_s * max(1.0, shortage),
        )


MEDIA = {
    transport.name: transport
    for transport in (
        Medium("ideal", 0.0, is_pipelined=True, has_trees=True),
        Medium("nccl", 0.52e-9, is_pipelined=True, has_trees=True),
        Medium("gloo", 0.22e-9, is_pipelined=False),
        # Time per message, fitted to the recommender on 4 and 8 machines: its eight tables send little else.
        Medium("messages", 0.58e-9, is_pipelined=True, message_s=0.35e-3),
    )
}


def find_medium(name: str) -> Medium:
    """Return a transport by name."""
    if name not in MEDIA:
        raise unknown_name("transport", name, list(MEDIA))
    return MEDIA[name]
