"""The Poseidon paper's cluster (2017), and how well its hardware explains its published speedups.

Hardware constants are given, not fitted. Two numbers are fitted to the table of VGG19-22K with the Caffe engine (15
speedups) and to nothing else; all other predictions follow without further fitting.
"""

from __future__ import annotations

from dataclasses import replace

from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.profile import Profile
from poseidon.sim.media import ETHERNET_PAYLOAD, MEDIA
from poseidon.sim.outcome import Outcome
from poseidon.sim.setting import Setting
from poseidon.sim.steps import simulate
from poseidon.sim.systems import find_system

TITAN_X_FLOPS = 6.144e12 * 2 / 3
"""GeForce GTX Titan X (Maxwell): 3072 cores x 2 operations x 1 GHz per its data sheet, of which the libraries of the
time reached about two thirds on VGG; one machine then trains on 33 images of VGG19-22K per second."""
BATCH = 32
"""Images per machine and step."""
LINK_BITS = 40e9
"""40 GbE."""
STAGING_BYTES_PER_S = 12e9
"""PCI Express 3.0 x16 in practice; gradients and values cross it to and from host memory."""
CHUNK_BYTES = 2 * 2**20
"""Size of the key-value pairs in the paper's servers."""
LATENCY_S = 200e-6
"""Latency between two programs, through both hosts' sockets."""

HOST_BITS = 14.0e9
"""First fitted number: socket throughput of the hosts of the time, including the servers' sums."""
INCAST_EXPONENT = 0.51
"""Second fitted number: when P machines all send at once after backward, the wire is slower by P to this power."""

NODES = (2, 4, 8, 16, 32)
PUBLISHED = {
    "poseidon-2017": (1.96, 3.83, 7.63, 15.03, 29.45),
    "dwbp-ps": (1.78, 3.28, 6.12, 11.56, 21.37),
    "ps": (1.01, 1.47, 2.16, 2.82, 4.42),
}
"""Speedups of VGG19-22K with the Caffe engine over 40 GbE."""
PUBLISHED_ELSEWHERE = (("inception-v3", 32, 40e9, 31.5), ("vgg19-22k", 16, 10e9, 15.5))
"""Network, machines, link, speedup of full Poseidon."""


def predict(profile: Profile, system: str, machines: int, link_bits: float = LINK_BITS) -> Outcome:
    """Simulate one figure; ``profile`` is the network's, estimated at :data:`TITAN_X_FLOPS` with :data:`BATCH`."""
    rate = min(link_bits * ETHERNET_PAYLOAD, HOST_BITS)
    setting = Setting(
        # The server applies the update, not the worker.
        profile=replace(profile, update_s=0.0),
        cluster=Cluster(machines, between=Link(rate, LATENCY_S), flops=TITAN_X_FLOPS),
        system=find_system(system),
        collectives=MEDIA["ideal"],
        messages=MEDIA["ideal"],
        payload=1.0,
        chunk_bytes=CHUNK_BYTES,
        staging_bytes_per_s=STAGING_BYTES_PER_S,
        incast_exponent=INCAST_EXPONENT,
        steps=3,
    )
    return simulate(setting)
