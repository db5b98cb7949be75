"""A Keras text model with a large embedding; start it with ``poseidon run --nproc 2 examples/keras/text.py``.

Learns which package of Python's standard library a piece of source text comes from. Only the rows of the embedding that
a batch touches travel between the workers. Also runs alone, and on any Keras backend.
"""

import argparse
import re
import sysconfig
import zlib
from pathlib import Path

import keras
import numpy as np
from keras import layers

import poseidon.keras

PACKAGES = ("asyncio", "email", "json", "logging", "multiprocessing", "unittest", "urllib", "xml")
ROWS = 100_000
"""Rows of the embedding; words are hashed to them."""
LENGTH = 40
"""Words in one piece of text."""


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return pieces of text, as row numbers, and their packages, in the same order on all workers."""
    pieces, labels = [], []
    for label, package in enumerate(PACKAGES):
        for path in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
            words = re.findall(r"[A-Za-z]+", path.read_text(encoding="utf-8", errors="ignore").lower())
            rows = [zlib.crc32(word.encode()) % ROWS for word in words if word not in PACKAGES]
            for start in range(0, len(rows) - LENGTH, LENGTH):
                pieces.append(rows[start : start + LENGTH])
                labels.append(label)
    order = np.random.default_rng(0).permutation(len(labels))
    return np.array(pieces, "int32")[order], np.array(labels)[order]


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pieces", type=int, default=None, help="use at most this many pieces of text")
    options = parser.parse_args()

    keras.utils.set_random_seed(1)
    pieces, labels = (array[: options.pieces] for array in load())
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(ROWS, 32),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(len(PACKAGES)),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.003),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    distributed = poseidon.keras.distribute(model)
    history = model.fit(pieces, labels, batch_size=32, epochs=options.epochs, validation_split=0.2)
    if distributed.rank == 0:
        print(distributed.summary())
    return history.history["val_accuracy"][-1]


if __name__ == "__main__":
    main()
