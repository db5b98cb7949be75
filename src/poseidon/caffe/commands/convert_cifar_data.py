"""``poseidon convert-cifar-data``: write CIFAR-10 to two databases, as Caffe's convert_cifar_data does."""

from __future__ import annotations

import argparse

from poseidon.caffe.glog import console
from poseidon.caffe.tools.convert_arrays import convert_cifar
from poseidon.caffe.tools.switches import add_logging_switches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_logging_switches(parser)
    parser.add_argument("folder", metavar="INPUT_FOLDER", help="the folder of CIFAR-10's binary version")
    parser.add_argument("output", metavar="OUTPUT_FOLDER", help="where to create cifar10_train_DB and cifar10_test_DB")
    parser.add_argument("backend", metavar="DB_TYPE", help="lmdb or leveldb")


def run(args: argparse.Namespace) -> int:
    """Convert."""
    with console():
        convert_cifar(args.folder, args.output, args.backend)
    return 0
