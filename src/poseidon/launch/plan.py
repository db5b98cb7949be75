"""``poseidon plan``: which route each layer of a model would take on a cluster, before anything is run on it."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from poseidon.errors import ConfigError
from poseidon.planning.cluster import Cluster, Link, parse_rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "model",
        help="a network of the zoo (vgg19, resnet152, ...) or module:callable; the callable takes the batch size and "
        "returns the model and its inputs (a tensor, a tuple or a dict)",
    )
    parser.add_argument("--batch", type=int, default=32, help="batch of each worker (default: 32)")
    parser.add_argument("--machines", type=int, default=4, help="number of machines (default: 4)")
    parser.add_argument("--workers-per-machine", type=int, default=1, help="workers on each (default: 1)")
    parser.add_argument("--rate", default="1gbit", help="link between machines, as in 10gbit (default: 1gbit)")
    parser.add_argument("--latency-us", type=float, default=200.0, help="latency between machines (default: 200)")
    parser.add_argument("--inside-rate", default="40gbit", help="link inside a machine (default: 40gbit)")
    parser.add_argument("--device-gflops", type=float, help="matrix rate of a worker's device (default: measured here)")
    parser.add_argument("--cluster", type=Path, help="take all of the above but the batch from this JSON file")
    parser.add_argument("--json", type=Path, help="also write the plan to this file")


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    if args.batch < 1:
        raise ConfigError(f"--batch is {args.batch}; it takes at least 1")
    cluster = Cluster.load(args.cluster) if args.cluster else _cluster(args)
    model, inputs = _load(args.model, args.batch)
    from poseidon.planning.sampling import plan

    result = plan(model, inputs, cluster)
    print(result)
    if args.json:
        try:
            args.json.write_text(result.to_json() + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {args.json}: {error}") from error
    return 0


def _cluster(args: argparse.Namespace) -> Cluster:
    cluster = Cluster(
        machines=args.machines,
        workers_per_machine=args.workers_per_machine,
        between=Link(parse_rate(args.rate), args.latency_us * 1e-6),
        inside=Link(parse_rate(args.inside_rate), 30e-6),
        source="given",
    )
    if args.device_gflops is not None:
        return replace(cluster, flops=args.device_gflops * 1e9)
    import torch

    from poseidon.team.calibrate import measure_flops

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return replace(cluster, flops=measure_flops(device), source=f"given; device measured on this machine's {device}")


def _load(name: str, batch: int) -> tuple[Any, Any]:
    from poseidon import zoo

    if name in zoo.names():
        network = zoo.build(name)
        return network.model, network.batch(batch)[0]
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"{name!r} is neither module:callable nor in the zoo; the zoo has {', '.join(zoo.names())}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load {name}: {error}") from error
    made = make(batch)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError(f"{name}({batch}) returned {type(made).__name__}, expected (model, inputs)")
    return made
