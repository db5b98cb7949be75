"""``poseidon plan``: which route each layer of a model would take on a cluster, and what speed to expect there."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.errors import unknown_name
from poseidon.planning.cluster import Cluster, Link, parse_rate
from poseidon.planning.planner import server_beats_nccl
from poseidon.planning.profile import Profile
from poseidon.planning.table import format_bytes
from poseidon.profiling.source import ProfileSource, device_flops, device_rates, find_profile
from poseidon.sim.advice import Explanation, explain, format_explanation
from poseidon.sim.media import ETHERNET_PAYLOAD, MEDIA
from poseidon.sim.proposals import format_proposals, proposals_to_dict, propose
from poseidon.sim.setting import Setting
from poseidon.sim.systems import SYSTEMS, find_system

GPU_FLOPS = 1e12
"""A device with a higher matrix rate counts as a GPU, whose collectives run on NCCL."""
TYPICAL_GPU_FLOPS = 20e12
STDOUT = Path("-")
"""Stands for the standard output where a file is asked for."""
BUSY_SPREAD = 1.5
"""Largest over smallest rate of one product: a machine on which it varies more is busy with something else."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_model_arguments(parser)
    parser.add_argument("--batch", type=int, help="batch of each worker (default: the profile's, or 32)")
    parser.add_argument("--machines", type=int, default=4, help="number of machines (default: 4)")
    parser.add_argument("--rate", default="1gbit", help="link between machines, as in 10gbit (default: 1gbit)")
    parser.add_argument("--cluster", type=Path, help="take machines, workers, links and device from this JSON file")
    systems = ", ".join(SYSTEMS)
    parser.add_argument("--system", default="poseidon", help=f"what is predicted, of: {systems} (default: poseidon)")
    parser.add_argument(
        "--allow",
        choices=("lossy",),
        help="lossy: propose ways that lose something too, with what each gains and costs",
    )
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE.json",
        help="print plan and prediction as JSON, and nothing else; with a FILE: also write them there",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the model and the machines."""
    parser.add_argument(
        "model",
        help="a network of the zoo (vgg19, resnet152, ...), a .prototxt, a profile's .json, or module:callable; the "
        "callable takes the batch size and returns the model and its inputs (a tensor, a tuple or a dict)",
    )
    parser.add_argument("--workers-per-machine", type=int, default=1, help="workers on each (default: 1)")
    parser.add_argument("--latency-us", type=float, default=200.0, help="latency between machines (default: 200)")
    parser.add_argument("--inside-rate", default="40gbit", help="link inside a machine (default: 40gbit)")
    times = parser.add_argument_group("how long the model computes")
    times.add_argument("--profile", type=Path, help="times of a profile that was measured before")
    times.add_argument("--measure", action="store_true", help="measure a profile on this machine's device now")
    times.add_argument(
        "--device-gflops", "--device-rate", type=float, metavar="GFLOPS",
        help="estimate from this matrix rate of a worker's device (default: this machine's, measured)",
    )  # fmt: skip
    times.add_argument("--save-profile", type=Path, help="write the profile to this file")
    parser.add_argument("--transport", default="auto", help="nccl, gloo, or auto: by the device (default)")


def run(args: argparse.Namespace) -> int:
    """Plan, predict and print."""
    source = make_source(args, args.batch)
    cluster = Cluster.load(args.cluster) if args.cluster else make_cluster(args, args.machines, parse_rate(args.rate))
    profile = find_profile(source)
    if args.cluster is None:
        cluster = with_device(cluster, source, profile)
    save_profile(args, profile)
    setting = make_setting(args, profile, cluster, args.system)
    explanation = explain(setting)
    plan = explanation.outcome.plan
    proposals = propose(setting) if args.allow and cluster.workers > 1 else None
    facts = {**plan.to_dict(), "prediction": _to_dict(explanation)} if args.json else {}
    if args.json and proposals is not None:
        facts["proposals"] = proposals_to_dict(proposals)
    if args.json == STDOUT:
        print(json.dumps(facts, indent=1))
        return 0
    print(plan)
    memory = f", {format_bytes(profile.memory_bytes)} of memory" if profile.memory_bytes else ""
    print(f"times: {profile.source}, {profile.device}, batch {profile.batch} per worker{memory}")
    print(format_explanation(explanation))
    if proposals is not None:
        print(format_proposals(proposals))
    if args.json:
        files.write_json(args.json, facts, "plan")
    return 0


def make_source(args: argparse.Namespace, batch: int | None) -> ProfileSource:
    """Return the model that the options describe."""
    flops = None if args.device_gflops is None else args.device_gflops * 1e9
    return ProfileSource(args.model, batch, args.profile, flops, args.measure)


def make_cluster(args: argparse.Namespace, machines: int, rate_bits: float) -> Cluster:
    """Return the cluster that the options describe, without its device."""
    return Cluster(
        machines=machines,
        workers_per_machine=args.workers_per_machine,
        between=Link(rate_bits, args.latency_us * 1e-6),
        inside=Link(parse_rate(args.inside_rate), 30e-6),
        source="given",
    )


def with_device(cluster: Cluster, source: ProfileSource, profile: Profile) -> Cluster:
    """Return the cluster with the device's matrix rate: as given, else measured here, else implied by the profile."""
    if source.flops is not None:
        return replace(cluster, flops=source.flops)
    if source.profile is None and not source.model.endswith(".json"):
        rates = device_rates()
        spread = f"{min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GFLOP/s in {len(rates)} rounds"
        if max(rates) > BUSY_SPREAD * min(rates):
            print(
                f"poseidon plan: warning: the device's measured rate varies a lot ({spread}); something else uses this "
                "machine. Repeat when it is quiet, or give the rate with --device-gflops",
                file=sys.stderr,
            )
        source_text = f"given; device measured on this machine ({spread})"
        return replace(cluster, flops=device_flops(source), source=source_text)
    return replace(cluster, flops=_implied_flops(profile), source="given; device as in the profile")


def _implied_flops(profile: Profile) -> float:
    """Return the rate at which a profile's linear units were computed, or a rate typical of its device."""
    linear = [(one, one.load) for one in profile.units if one.unit.kind == "linear" and one.load is not None]
    spent_s = sum(one.forward_s + one.backward_s for one, _ in linear)
    if spent_s > 0:
        # One product in forward and two in backward, with two operations per row and value.
        return sum(6 * load.rows * math.prod(one.unit.matrix) for one, load in linear) / spent_s
    return TYPICAL_GPU_FLOPS if profile.device.startswith("cuda") else Cluster(1).flops


def make_setting(args: argparse.Namespace, profile: Profile, cluster: Cluster, system: str) -> Setting:
    """Return the simulation that the options describe."""
    if args.transport not in ("auto", "nccl", "gloo"):
        raise unknown_name("--transport", args.transport, ("auto", "nccl", "gloo"))
    is_gpu = profile.device.startswith("cuda") or cluster.flops >= GPU_FLOPS
    transport = args.transport if args.transport != "auto" else ("nccl" if is_gpu else "gloo")
    simulated = find_system(system)
    return Setting(
        profile,
        cluster,
        simulated,
        collectives=MEDIA[transport],
        offers_server=transport == "gloo" or server_beats_nccl(cluster, simulated.overlaps_forward),
        # A profile does not record Triton, which compacts gradients; PyTorch for CUDA includes it.
        compacts=transport == "nccl",
        payload=1.0 if cluster.source == "measured" else ETHERNET_PAYLOAD,
        gathers_factors=transport == "nccl",
    )


def save_profile(args: argparse.Namespace, profile: Profile) -> None:
    """Write the profile if an option asks for it."""
    if args.save_profile:
        profile.save(args.save_profile)


def _to_dict(explanation: Explanation) -> dict[str, Any]:
    outcome = explanation.outcome
    return {
        "step_ms": outcome.step_s * 1e3,
        "compute_ms": outcome.compute_s * 1e3,
        "speedup": outcome.speedup,
        "samples_per_s": outcome.samples_per_s,
        "limit": explanation.limit,
        "reason": explanation.reason,
        "changes": [
            {"what": change.what, "samples_per_s": change.samples_per_s, "gain": change.gain}
            for change in explanation.changes
        ],
    }
