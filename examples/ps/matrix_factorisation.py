"""Fill in missing pixels by factorising a matrix on several workers.

The matrix is scikit-learn's handwritten digits, 1797 images of 64 pixels, with a third of the entries hidden. Each
worker has some of the images. Factors of pixels are shared rows that all workers read and change; factors of images are
rows that only one worker uses. The error is measured on the hidden entries.

    torchrun --nproc-per-node 4 examples/ps/matrix_factorisation.py --pause 0.03 --plot factorisation.png
"""

from __future__ import annotations

import time

import numpy as np
from curves import Curve, Straggler, collect, plot, read_arguments
from sklearn.datasets import load_digits

import poseidon.ps

RANK = 8
BATCH = 128
RATE = 0.05
DECAY = 0.02


def load_images(worker: int, workers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return this worker's image numbers, their pixels, and which of them are known."""
    images = load_digits().data.astype(np.float32) / 16
    known = np.random.default_rng(0).random(images.shape) < 2 / 3
    mine = np.arange(worker, len(images), workers)
    return mine, images[mine], known[mine]


def factorise(job: poseidon.ps.TableJob, staleness: int, clocks: int, straggler: Straggler) -> Curve:
    worker, workers = job.workers.index(job.rank), len(job.workers)
    numbers, images, known = load_images(worker, workers)
    consistency = {"consistency": "ssp", "staleness": staleness} if staleness else {"consistency": "bsp"}
    pixel_factors = job.table(f"pixels {staleness}", rows=64, width=RANK, **consistency)
    image_factors = job.table(f"images {staleness}", rows=1797, width=RANK, **consistency)
    start = np.random.default_rng(1)
    pixel_factors.start_from(start.normal(0, 0.3, (64, RANK)))
    image_factors.start_from(start.normal(0, 0.3, (1797, RANK)))
    batches = np.random.default_rng(worker)
    errors, seconds, began = [], [], time.monotonic()
    for _ in range(clocks):
        batch = batches.choice(len(numbers), BATCH, replace=False)
        pixels = pixel_factors.get(range(64))
        factors = image_factors.get(numbers[batch])
        difference = factors @ pixels.T - images[batch]
        errors.append(float(np.sqrt(np.mean(difference[~known[batch]] ** 2))))
        difference *= known[batch]
        image_factors.inc(numbers[batch], -RATE * (difference @ pixels + DECAY * factors))
        # A pixel occurs in every image of the batch, so its steps are shorter, and all workers take one.
        pixel_factors.inc(range(64), -RATE / workers * (difference.T @ factors * 16 / BATCH + DECAY * pixels))
        straggler.maybe_pause()
        image_factors.clock()
        pixel_factors.clock()
        seconds.append(time.monotonic() - began)
    seen = dict(pixel_factors.staleness_seen)
    return collect(job, staleness, errors, seconds, seen)


def main() -> list[Curve]:
    arguments = read_arguments("factorise the digits matrix")
    with poseidon.ps.connect() as job:
        straggler = Straggler(job.rank, arguments.pause)
        curves = [factorise(job, staleness, arguments.clocks, straggler) for staleness in arguments.staleness]
        if job.rank == 0:
            for curve in curves:
                print(curve.describe())
            if arguments.plot:
                plot(arguments.plot, "error on hidden pixels (RMS)", curves)
    return curves


if __name__ == "__main__":
    main()
