"""``poseidon compute-image-mean``: the mean image of a database, with the flags of Caffe's compute_image_mean."""

from __future__ import annotations

import argparse

from poseidon.caffe.commands.flags import add_flag
from poseidon.caffe.glog import console
from poseidon.caffe.tools.image_mean import compute_image_mean
from poseidon.caffe.tools.switches import add_logging_switches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_flag(parser, "backend", str, "lmdb", "lmdb (default) or leveldb")
    add_logging_switches(parser)
    parser.add_argument("database", metavar="INPUT_DB", help="the database of images")
    parser.add_argument("output", metavar="OUTPUT_FILE", nargs="?", help="the .binaryproto to write")


def run(args: argparse.Namespace) -> int:
    """Compute, write and show the mean."""
    with console():
        compute_image_mean(args.database, args.backend, args.output)
    return 0
