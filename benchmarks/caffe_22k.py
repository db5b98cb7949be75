"""A database as large as ImageNet-22K's: 14.2 million records with 21,841 labels, made here and of few bytes each.

::

    python benchmarks/caffe_22k.py [--records 14197122] [--folder DIR]

Shows how long it takes to open it and to begin at a late worker's part or after any record, that a worker's memory does
not grow while it reads, and that a resumed training goes on with the right record. Takes some minutes and 5 GB.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import poseidon.caffe as caffe
from poseidon.caffe.io.database import new_database, open_database
from poseidon.caffe.schema import Datum

RECORDS, LABELS, BATCH, WORKERS = 14_197_122, 21_841, 256, 32
SHAPE = (3, 8, 8)
PROTOTXT = """
layer { name: "data" type: "Data" top: "data" top: "label" transform_param { crop_size: 7 mirror: true }
  data_param { source: "db" backend: LMDB batch_size: %d } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "Reduction" bottom: "ip" top: "loss" loss_weight: 1e-9 }
layer { name: "silence" type: "Silence" bottom: "label" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 1e-6 lr_policy: "fixed" snapshot_prefix: "s" max_iter: 1000 random_seed: 1'


def label_of(number: int) -> int:
    """Return the label of a record; no two neighbours have the same."""
    return number * 7919 % LABELS


def make(path: str, count: int) -> None:
    """Write the database."""
    channels, height, width = SHAPE
    data = np.random.default_rng(1).integers(0, 256, SHAPE).astype(np.uint8).tobytes()
    with new_database("lmdb", path) as writer:
        for number in range(count):
            datum = Datum(channels=channels, height=height, width=width, data=data, label=label_of(number))
            writer.put(b"%08d_n%08d" % (number, label_of(number)), datum.SerializeToString())


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long the block takes."""
    began, spent = time.perf_counter(), time.process_time()
    yield
    print(f"{what:62s} {time.perf_counter() - began:8.3f} s ({time.process_time() - spent:.3f} s of processor time)")


def memory_mb() -> float:
    """Return this process's memory."""
    return float(psutil.Process().memory_info().rss) / 1e6


def labels_of(net: Any) -> list[int]:
    """Return the labels of the next batch."""
    net.forward()
    return [int(label) for label in net.blobs["label"].data]


def expect(labels: list[int], first: int, count: int) -> None:
    """Check that a batch holds the records from ``first`` on."""
    wanted = [label_of((first + row) % count) for row in range(len(labels))]
    if labels != wanted:
        raise SystemExit(f"wrong records: expected those from {first} on ({wanted[:3]} ...), got {labels[:3]} ...")


def begin_as_worker(rank: int, count: int) -> None:
    """Begin as one of many workers; each reads its own ranges."""
    caffe.set_solver_count(WORKERS)
    caffe.set_solver_rank(rank)
    with timed(f"worker {rank} of {WORKERS}: open, first batch"):
        net = caffe.Net("net.prototxt", caffe.TRAIN)
        expect(labels_of(net), rank * BATCH, count)
    late = count // (WORKERS * BATCH) * WORKERS * BATCH - 10 * WORKERS * BATCH
    with timed(f"worker {rank} of {WORKERS}: continue after record {late}"):
        net.layers[0].continue_after(late, net.layers[0].seed)
        expect(labels_of(net), late + rank * BATCH, count)
    caffe.set_solver_count(1)
    caffe.set_solver_rank(0)


def read_on(batches: int, count: int) -> None:
    """Read as one worker, and see how the memory develops."""
    net = caffe.Net("net.prototxt", caffe.TRAIN)
    for number in range(20):
        expect(labels_of(net), number * BATCH, count)
    before = memory_mb()
    with timed(f"{batches * BATCH} records read"):
        for number in range(20, 20 + batches):
            expect(labels_of(net), number * BATCH, count)
    print(f"memory: {before:.0f} MB before, {memory_mb():.0f} MB after")


def resume(count: int) -> None:
    """Train, write a snapshot deep in the database, and resume it in a solver of its own."""
    Path("solver.prototxt").write_text(SOLVER)
    solver = caffe.get_solver("solver.prototxt")
    deep = count * 9 // 10 // BATCH * BATCH
    solver.net.layers[0].continue_after(deep, solver.net.layers[0].seed)
    solver.step(3)
    solver.snapshot()
    with timed(f"resume a training that has read {deep + 3 * BATCH} records"):
        again = caffe.get_solver("solver.prototxt")
        again.restore("s_iter_3.solverstate")
        expect(labels_of(again.net), deep + 3 * BATCH, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--batches", type=int, default=4000, help="how many batches of 256 to read for the memory")
    parser.add_argument("--folder", help="where to write the database; by default a temporary folder")
    args = parser.parse_args()
    caffe.set_mode_cpu()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        os.chdir(folder)
        Path("net.prototxt").write_text(PROTOTXT % BATCH)
        with timed(f"write {args.records} records with {LABELS} labels"):
            make("db", args.records)
        print(f"the database has {Path('db/data.mdb').stat().st_size / 1e9:.1f} GB")
        with timed("open, first record"):
            next(open_database("lmdb", "db").records())
        for rank in (0, WORKERS - 1):
            begin_as_worker(rank, args.records)
        read_on(args.batches, args.records)
        resume(args.records)
        os.chdir("/")


if __name__ == "__main__":
    main()
