"""``poseidon upgrade-net``: rewrite an old net (text or binary) or solver in the present form."""

from __future__ import annotations

import argparse

from poseidon.caffe.commands.flags import add_flag
from poseidon.caffe.glog import console
from poseidon.caffe.tools.switches import add_logging_switches
from poseidon.caffe.tools.upgrade_files import KINDS, upgrade_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_flag(parser, "type", str, "auto", f"what the file is: {', '.join(KINDS)} (default: auto, by its content)")
    add_logging_switches(parser)
    parser.add_argument("source", metavar="FILE_IN", help="the old prototxt, caffemodel or solver prototxt")
    parser.add_argument("target", metavar="FILE_OUT", help="where the new form goes")


def run(args: argparse.Namespace) -> int:
    """Upgrade the file."""
    with console():
        upgrade_file(args.source, args.target, args.type)
    return 0
