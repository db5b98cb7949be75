"""``poseidon partition-data``: split a database or list into one part per worker."""

from __future__ import annotations

import argparse

from poseidon.caffe.commands.flags import add_flag
from poseidon.caffe.glog import console
from poseidon.caffe.tools.partition import partition
from poseidon.caffe.tools.switches import add_logging_switches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_flag(parser, "backend", str, None, "lmdb or leveldb (default: whichever the database is)")
    add_flag(parser, "num_partitions", int, 2, "number of parts (default 2)")
    add_logging_switches(parser)
    parser.add_argument("path", metavar="DB_PATH", help="a database, or a list of images, HDF5 files or windows")


def run(args: argparse.Namespace) -> int:
    """Write the parts as DB_PATH_0, DB_PATH_1, ..."""
    with console():
        partition(args.path, args.num_partitions, args.backend)
    return 0
