"""``poseidon convert-imageset``: write images to a database, with the flags of Caffe's convert_imageset."""

from __future__ import annotations

import argparse

from poseidon.caffe.commands.flags import add_flag
from poseidon.caffe.glog import console
from poseidon.caffe.tools.convert_imageset import Conversion, convert_imageset
from poseidon.caffe.tools.switches import add_logging_switches, add_switch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_switch(parser, "gray", "treat images as grayscale ones")
    add_switch(parser, "shuffle", "shuffle the images and their labels")
    add_flag(parser, "backend", str, "lmdb", "lmdb (default) or leveldb")
    add_flag(parser, "resize_width", int, 0, "width that images are resized to (0: as they are)")
    add_flag(parser, "resize_height", int, 0, "height that images are resized to (0: as they are)")
    add_switch(parser, "check_size", "stop if an image is not as large as the first")
    add_switch(parser, "encoded", "store image files instead of pixels")
    add_flag(parser, "encode_type", str, "", "the kind of image file to store: png, jpg, ...")
    add_logging_switches(parser)
    parser.add_argument("root_folder", metavar="ROOTFOLDER/", help="put in front of every name in the list")
    parser.add_argument("list_file", metavar="LISTFILE", help="lines of: file name, space, label")
    parser.add_argument("database", metavar="DB_NAME", help="the database to create")


def run(args: argparse.Namespace) -> int:
    """Convert; images that cannot be read are reported and left out."""
    conversion = Conversion(
        is_gray=args.gray,
        resize_height=args.resize_height,
        resize_width=args.resize_width,
        encoded=args.encoded,
        encode_type=args.encode_type,
        check_size=args.check_size,
    )
    with console():
        convert_imageset(args.root_folder, args.list_file, args.database, args.backend, conversion, args.shuffle)
    return 0
