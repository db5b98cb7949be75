"""Shared by both examples: pauses that make stragglers, errors collected in a table, and a picture of them."""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from poseidon.ps import TableJob


def read_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--clocks", type=int, default=200, help="steps of every worker")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 8], help="values to compare")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="extra seconds of a fifth of all steps")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the error over clocks and seconds")
    return parser.parse_args()


class Straggler:
    """Slows a worker now and then, as on machines that others use too."""

    def __init__(self, rank: int, pause_s: float) -> None:
        self._random = random.Random(rank)
        self._pause_s = pause_s

    def maybe_pause(self) -> None:
        """Sleep in a fifth of all calls."""
        if self._random.random() < 0.2:
            time.sleep(self._pause_s)


@dataclass
class Curve:
    """The error of one run, averaged over workers: after each clock, and at the time the slowest worker reached it."""

    staleness: int
    errors: list[float]
    seconds: list[float]
    seen: dict[int, int]
    """How many rows were read at which staleness, by this worker."""

    def describe(self) -> str:
        """Return the result in one line."""
        mean = sum(behind * count for behind, count in self.seen.items()) / sum(self.seen.values())
        return (
            f"staleness {self.staleness}: error {self.errors[0]:.4f} -> {self.errors[-1]:.4f} "
            f"in {self.seconds[-1]:.1f} s; reads were {mean:.2f} clocks behind on average, {max(self.seen)} at most"
        )


def collect(job: TableJob, staleness: int, errors: list[float], seconds: list[float], seen: dict[int, int]) -> Curve:
    """Share each worker's errors and times in a table and return their mean and latest; all workers call it."""
    rank, workers = job.workers.index(job.rank), len(job.workers)
    table = job.table(f"errors at staleness {staleness}", rows=workers, width=2 * len(errors), dtype="float64")
    table.inc(rank, [*errors, *seconds])
    table.clock()
    everybody = table.get(range(workers))
    mean, latest = everybody[:, : len(errors)].mean(axis=0), everybody[:, len(errors) :].max(axis=0)
    return Curve(staleness, mean.tolist(), latest.tolist(), seen)


def plot(path: Path, title: str, curves: list[Curve]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for curve in curves:
        label = f"staleness {curve.staleness}" + (" (BSP)" if curve.staleness == 0 else "")
        smooth = [np.mean(curve.errors[max(0, clock - 7) : clock + 1]) for clock in range(len(curve.errors))]
        left.plot(np.arange(1, len(smooth) + 1), smooth, label=label)
        right.plot(curve.seconds, smooth, label=label)
    left.set(xlabel="clocks", ylabel=title, ylim=(0, None))
    right.set(xlabel="seconds, with stragglers")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
