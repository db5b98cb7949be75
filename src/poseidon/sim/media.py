"""How efficiently real transports use a wire: named constants, each with its source.

A byte costs time on the wire and work on the host. Where the two overlap (pipelined), the slower one dominates, with a
smooth transition: ``(wire^3 + host^3)^(1/3)``, or with squares where many threads share the host's part. Where they
alternate, they add up.

The host's part was measured by summing 241 MB over 8 emulated machines (each sends 422 MB) on 16 cores, two per worker,
at two link speeds, in two or three runs (``benchmarks/wire.sh gpu``); minimum .. maximum:

=================  ==========  ==========  ===================================
ms                 10 Gbit/s   25 Gbit/s   model
=================  ==========  ==========  ===================================
the wire alone     338         135
NCCL over TCP      360 .. 390  195 .. 265  pipelined, 0.52 ns/byte: 367, 236
gloo               360 .. 439  213 .. 285  added, 0.22 ns/byte: 432, 229
the sharded sum    362 .. 382  210 .. 260  squares, 0.42 ns/byte: 381, 223
=================  ==========  ==========  ===================================

Where workers compute on the cores that also move the bytes, each takes from the other. Processor time per byte and per
message was measured with 67 MB on 4 machines at 1 Gbit/s (``benchmarks/results/wire_1gbe.json``, chunks of 0.5 to 4
MB), and delays the computation. In turn, a thread that a message wakes waits until the scheduler takes a core from a
worker, so bytes are slower while workers compute: :data:`STALL_S_PER_BYTE`, fitted to ResNet-18 on 2, 4 and 6 machines
that share 2 cores at 500 Mbit/s.

Python runs one thread of a worker at a time, so what handles messages and what issues work to a device take turns:

* A message takes :data:`HANDLING_S` at either end: half of the processor time per message above. Where a device
  compacts it, which takes a dozen calls into PyTorch, it takes :data:`DEVICE_HANDLING_S`: fitted to ResNet-50,
  ViT-B/16 and GPT-2 in bf16 on 8 machines at 10 Gbit/s, as is the next.
* A device runs dry while the next forward waits for its weights. From then on a unit's forward takes at least as long
  as the host needs to issue it: measured with the profile on a device, else :data:`ISSUE_S`.

Compacting is work for the device, which workers may share: :data:`COMPACT_S` and so on, by ``benchmarks/compact.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

ETHERNET_PAYLOAD = 1448 / 1538
"""Share of an Ethernet link that carries data: TCP with timestamps at MTU 1500, including preamble and gap."""
LAB_PAYLOAD = 0.997
"""The same in an emulated cluster, whose shaping counts packets before they are cut to the MTU; measured there."""
CORES_MEASURED = 2.0
"""Cores per worker when the host's part was measured."""
LEAST_HOST = 0.8
"""What remains of the host's part with spare cores, when a transport's own thread cannot be parallelized further:
fitted to 2 and 4 machines on 16 cores at 25 Gbit/s."""
STALL_S_PER_BYTE = 4e-9
"""Additional time per byte while one worker computes on each core."""
HANDLING_S, DEVICE_HANDLING_S = 0.07e-3, 0.3e-3
"""Interpreter time of a message through the parameter server, at each end; of one that a device compacts."""
PACKING_S, LOOKING_S = 2.3e-3, 1.8e-3
"""The recommender on 8 machines that share a GPU: from the last table's gradient until its rows are in host memory, and
for a look for repeated rows. It waits for the device several times."""
ISSUE_S = 0.1e-3
"""Interpreter time to issue one unit's forward to a device."""
COMPACT_S, ADD_S, RESTORE_S = (ms / 1e3 / 2**23 for ms in (0.08, 0.12, 0.07))
"""Device time to compact a value; to restore it, add it to the sum and compact that; to restore a sum. On an H200."""


@dataclass(frozen=True)
class Medium:
    """How a transport uses the wire and the host."""

    name: str
    host_s_per_byte: float
    """Host work per byte a machine sends (and receives)."""
    is_pipelined: bool
    """Host work overlaps with the wire; otherwise they add up."""
    corner: float = 3.0
    """The higher, the less the shorter of two that overlap counts."""
    message_s: float = 0.0
    """Host work for one unit's direct messages to one peer, and as much for those it receives from that peer."""
    packing_s: float = 0.0
    """Until a device has sorted the rows of tables that travel together and the host has them..."""
    looking_s: float = 0.0
    """... and what finding those that repeat each other adds."""
    work_s_per_byte: float = 0.0
    """Processor time for each byte a machine sends and another that it receives."""
    work_s_per_message: float = 0.0
    """The same for each message, where messages are small enough to matter."""
    handling_s: float = 0.0
    """Interpreter time of one message through the parameter server, at each end..."""
    device_handling_s: float = 0.0
    """... and of one that a device compacts."""
    stall_power: float = 1.0
    """How the additional time of a byte grows with the workers on each core that computes."""
    stall_s_per_byte: float = 0.0
    """Additional time of a byte while workers compute; see :meth:`crowded`."""
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
        return float((wire**self.corner + host**self.corner) ** (1 / self.corner))

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
            packing_s=self.packing_s * max(1.0, shortage),
            looking_s=self.looking_s * max(1.0, shortage),
            handling_s=self.handling_s * max(1.0, shortage),
            device_handling_s=self.device_handling_s * max(1.0, shortage),
        )

    def crowded(self, cores_per_worker: float) -> Medium:
        """Return the transport where workers compute on the same cores, one thread each."""
        stall = _taken(cores_per_worker) * STALL_S_PER_BYTE * max(1.0, 1 / cores_per_worker) ** self.stall_power
        return replace(self, stall_s_per_byte=stall)


def _taken(cores_per_worker: float) -> float:
    """Return how much of the cores a worker's computation takes: all of them below one core, none of a spare one."""
    return max(0.0, min(1.0, 2.0 - cores_per_worker))


def contention_on(cores_per_worker: float) -> float:
    """Return how many seconds a second of processor time for exchanges delays a worker that computes on one thread."""
    return _taken(cores_per_worker) / min(cores_per_worker, 1.0)


MEDIA = {
    transport.name: transport
    for transport in (
        Medium("ideal", 0.0, is_pipelined=True, has_trees=True),
        Medium("nccl", 0.52e-9, is_pipelined=True, has_trees=True),
        Medium("gloo", 0.22e-9, is_pipelined=False, work_s_per_byte=0.78e-9),
        # Time per message, fitted to the recommender on 4 and 8 machines at 25 Gbit/s: its tables send little else.
        # Since then, as processor time: 0.32 ms (benchmarks/small_steps.py dlrm --width 0.02 --workers 4 --machines).
        Medium(
            "messages",
            0.42e-9,
            is_pipelined=True,
            corner=2.0,
            message_s=0.35e-3,
            packing_s=PACKING_S,
            looking_s=LOOKING_S,
            work_s_per_byte=0.69e-9,
            work_s_per_message=0.143e-3,
            handling_s=HANDLING_S,
            device_handling_s=DEVICE_HANDLING_S,
            stall_power=1.25,  # parts and sums: two messages one after the other
        ),
    )
}


@dataclass(frozen=True)
class Transports:
    """The transports of one worker and what its share of the cores makes of them."""

    collectives: Medium
    messages: Medium
    contention: float
    issue_s: float = 0.0
    """Interpreter time to issue a unit's forward to a device; 0 where the host computes."""


def transports_of(is_nccl: bool, cores_per_worker: float, computes: bool) -> Transports:
    """Return the transports of workers with this many cores each; ``computes``: they also compute on these cores."""
    collectives = MEDIA["nccl" if is_nccl else "gloo"].on_cores(cores_per_worker)
    messages = MEDIA["messages"].on_cores(cores_per_worker)
    if not computes:
        return Transports(collectives, messages, 0.0, ISSUE_S)
    contention = contention_on(cores_per_worker)
    return Transports(collectives.crowded(cores_per_worker), messages.crowded(cores_per_worker), contention)
