"""Steps per second and final loss when workers stall now and then, exact and with bounded staleness.

Usage: python benchmarks/stragglers.py [--workers 4] [--steps 80] [--seeds 5] [--staleness 4] [--output FILE]

LeNet on handwritten digits. Every step of a worker takes ``--step-ms`` (computation included), and with probability 0.2
three times as much on top: the same stalls for both systems. Loss and accuracy are those of worker 0's parameters on
1,000 unseen images after all steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import poseidon
from poseidon import zoo
from poseidon.launch.local import follow_launcher, run_workers
from poseidon.zoo.digits import TRAINED, load_digits

PROBABILITY, STEPS_LOST = 0.2, 3
BATCH = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=150.0)
    parser.add_argument("--output", type=Path, default=Path("stragglers.json"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
    return run_workers(command, options.workers) or show(options)


def show(options: argparse.Namespace) -> int:
    results = json.loads(options.output.read_text())
    for system, runs in results.items():
        rate, loss, right = ([run[key] for run in runs] for key in ("steps_per_s", "loss", "accuracy"))
        spread = statistics.stdev(loss) if len(loss) > 1 else 0.0
        print(
            f"{system:<6} {statistics.median(rate):7.2f} steps/s ({min(rate):.2f} .. {max(rate):.2f})   "
            f"loss {statistics.mean(loss):.4f} +- {spread:.4f}   accuracy {statistics.mean(right):.2%}"
        )
    bsp, ssp = (statistics.median(run["steps_per_s"] for run in results[system]) for system in ("bsp", "ssp"))
    print(f"ssp does {ssp / bsp:.2f} times the steps of bsp")
    return 0


def work(options: argparse.Namespace) -> None:
    follow_launcher()
    torch.set_num_threads(1)
    world = poseidon.init()
    results: dict[str, list[dict[str, float]]] = {"bsp": [], "ssp": []}
    for seed in range(options.seeds):
        for system in results:
            figures = train(options, system, seed)
            results[system].append(figures)
            if world.rank == 0:
                print(f"seed {seed}, {system}: {figures['steps_per_s']:.2f} steps/s", flush=True)
    if world.rank == 0:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def train(options: argparse.Namespace, system: str, seed: int) -> dict[str, float]:
    images, digits = load_digits()
    rank = dist.get_rank()
    torch.manual_seed(seed)
    network = zoo.build("lenet")
    optimizer = torch.optim.SGD(network.model.parameters(), lr=0.03, momentum=0.9)
    consistency = {"staleness": options.staleness} if system == "ssp" else {}
    model, optimizer = poseidon.distribute(network.model, optimizer, consistency=system, **consistency)
    chance = torch.Generator().manual_seed(1000 * seed + rank)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(options.steps):
        is_stalled = torch.rand((), generator=chance).item() < PROBABILITY
        mine = torch.randint(TRAINED, (BATCH,), generator=chance)
        computed_s = time.thread_time()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), digits[mine])
        # What was computed counts, what was waited for does not. A stalled worker's gradients come late.
        computed_s = time.thread_time() - computed_s
        time.sleep(max(0.0, options.step_ms / 1e3 * (1 + STEPS_LOST * is_stalled) - computed_s))
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    everybody: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everybody, seconds)
    figures = {"steps_per_s": options.steps / statistics.mean(everybody), **score(model, images, digits)}
    model.close()
    return figures


@torch.no_grad()
def score(model: torch.nn.Module, images: torch.Tensor, digits: torch.Tensor) -> dict[str, float]:
    outputs = model.eval()(images[TRAINED:])
    answers = digits[TRAINED:]
    right = (outputs.argmax(1) == answers).float().mean().item()
    return {"loss": F.cross_entropy(outputs, answers).item(), "accuracy": right}


if __name__ == "__main__":
    sys.exit(main())
