"""What the wrapper costs when there is one worker: ResNet-18, plain and wrapped, interleaved.

Usage: python benchmarks/one_worker.py [ROUNDS]. Prints the median step of both and their ratio.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

import poseidon
from poseidon import zoo


def main(rounds: int) -> None:
    torch.manual_seed(0)
    network = zoo.build("resnet18", image_size=64)
    inputs, targets = network.batch(4)
    systems = {"plain": network.model, "poseidon": poseidon.DistributedDataParallel(network.model)}
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 3):
        for name, model in systems.items():
            start = time.perf_counter()
            model.zero_grad()
            network.loss(model(*inputs), targets).backward()
            if number >= 3:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:<9} {value * 1e3:8.2f} ms")
    print(f"ratio     {medians['poseidon'] / medians['plain']:8.4f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
