"""Multinomial logistic regression on several workers.

Scikit-learn's handwritten digits, ten classes; each worker has some of the images. The weights are a table with a row
for every class.

    torchrun --nproc-per-node 4 examples/ps/logistic_regression.py --pause 0.03 --plot regression.png
"""

from __future__ import annotations

import time

import numpy as np
from curves import Curve, Straggler, collect, plot, read_arguments
from sklearn.datasets import load_digits

import poseidon.ps

BATCH = 64
RATE = 0.5
TEST = 297
"""The last images are kept for testing."""


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Return images, with a constant last pixel for the bias, and labels."""
    digits = load_digits()
    images = np.hstack([digits.data / 16, np.ones((len(digits.data), 1))]).astype(np.float32)
    return images, digits.target


def probabilities(images: np.ndarray, weights: np.ndarray) -> np.ndarray:
    scores = images @ weights.T
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def train(job: poseidon.ps.TableJob, staleness: int, clocks: int, straggler: Straggler) -> tuple[Curve, float]:
    worker, workers = job.workers.index(job.rank), len(job.workers)
    images, labels = load_data()
    mine = np.arange(worker, len(images) - TEST, workers)
    consistency = {"consistency": "ssp", "staleness": staleness} if staleness else {"consistency": "bsp"}
    table = job.table(f"weights {staleness}", rows=10, width=images.shape[1], **consistency)
    batches = np.random.default_rng(worker)
    errors, seconds, began = [], [], time.monotonic()
    for _ in range(clocks):
        batch = batches.choice(mine, BATCH, replace=False)
        predicted = probabilities(images[batch], table.get(range(10)))
        errors.append(float(-np.log(predicted[np.arange(BATCH), labels[batch]]).mean()))
        predicted[np.arange(BATCH), labels[batch]] -= 1
        table.inc(range(10), -RATE / workers / BATCH * predicted.T @ images[batch])
        straggler.maybe_pause()
        table.clock()
        seconds.append(time.monotonic() - began)
    curve = collect(job, staleness, errors, seconds, dict(table.staleness_seen))
    predicted = probabilities(images[-TEST:], table.get(range(10))).argmax(axis=1)
    return curve, float((predicted == labels[-TEST:]).mean())


def main() -> list[tuple[Curve, float]]:
    arguments = read_arguments("classify the digits")
    with poseidon.ps.connect() as job:
        straggler = Straggler(job.rank, arguments.pause)
        results = [train(job, staleness, arguments.clocks, straggler) for staleness in arguments.staleness]
        if job.rank == 0:
            for curve, accuracy in results:
                print(f"{curve.describe()}; {accuracy:.1%} of unseen digits recognised")
            if arguments.plot:
                plot(arguments.plot, "cross-entropy (nats)", [curve for curve, _ in results])
    return results


if __name__ == "__main__":
    main()
