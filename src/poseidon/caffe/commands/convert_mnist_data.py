"""``poseidon convert-mnist-data``: write MNIST to a database, with the flags of Caffe's convert_mnist_data."""

from __future__ import annotations

import argparse

from poseidon.caffe.commands.flags import add_flag
from poseidon.caffe.glog import console
from poseidon.caffe.tools.convert_arrays import convert_mnist
from poseidon.caffe.tools.switches import add_logging_switches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_flag(parser, "backend", str, "lmdb", "lmdb (default) or leveldb")
    add_logging_switches(parser)
    parser.add_argument("images", metavar="INPUT_IMAGE_FILE", help="for example train-images-idx3-ubyte")
    parser.add_argument("labels", metavar="INPUT_LABEL_FILE", help="for example train-labels-idx1-ubyte")
    parser.add_argument("database", metavar="OUTPUT_DB", help="the database to create")


def run(args: argparse.Namespace) -> int:
    """Convert."""
    with console():
        convert_mnist(args.images, args.labels, args.database, args.backend)
    return 0
