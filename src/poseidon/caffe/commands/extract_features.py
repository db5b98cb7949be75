"""``poseidon extract-features``: a net's blobs as databases, with the arguments of Caffe's extract_features."""

from __future__ import annotations

import argparse
import logging

from poseidon.caffe import device
from poseidon.caffe.glog import console
from poseidon.caffe.tools.extract_features import extract_features
from poseidon.caffe.tools.switches import add_logging_switches
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_logging_switches(parser)
    parser.add_argument("weights", metavar="PRETRAINED", help="the .caffemodel")
    parser.add_argument("model", metavar="PROTOTXT", help="a net with a data layer")
    parser.add_argument("blobs", metavar="BLOB[,BLOB...]", help="the blobs to store")
    parser.add_argument("databases", metavar="DB[,DB...]", help="one new database per blob")
    parser.add_argument("batches", metavar="NUM_BATCHES", type=int, help="how many batches to run")
    parser.add_argument("backend", metavar="DB_TYPE", help="lmdb or leveldb")
    parser.add_argument("mode", metavar="CPU|GPU", nargs="?", choices=("CPU", "GPU"), default="CPU")
    parser.add_argument("device", metavar="DEVICE_ID", nargs="?", default="0", help="which GPU (default 0)")


def run(args: argparse.Namespace) -> int:
    """Extract the features."""
    with console():
        _choose_device(args.mode, args.device)
        extract_features(
            args.weights, args.model, args.blobs.split(","), args.databases.split(","), args.batches, args.backend
        )
    return 0


def _choose_device(mode: str, number: str) -> None:
    if mode == "CPU":
        log.error("Using CPU")
        device.set_mode_cpu()
        return
    number = number.removeprefix("DEVICE_ID=")
    if not number.isdigit():
        raise ConfigError(f"DEVICE_ID is {number!r}; a GPU's number is expected")
    log.error("Using GPU")
    log.error("Using Device_id=%s", number)
    device.set_device(int(number))
    device.set_mode_gpu()
