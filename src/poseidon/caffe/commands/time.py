"""``poseidon time``: how long each layer of a net takes, forward and backward."""

from __future__ import annotations

import argparse

from poseidon.caffe.commands.flags import add_caffe_flags, need, on_device, stages_of
from poseidon.errors import unknown_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_caffe_flags(parser, ("model", "iterations", "phase", "gpu", "level", "stage"))


def run(args: argparse.Namespace) -> int:
    """Time the net and log Caffe's report."""
    from poseidon.caffe.pycaffe import Net
    from poseidon.caffe.schema import TEST, TRAIN
    from poseidon.caffe.scoring import benchmark

    phases = {"": TRAIN, "TRAIN": TRAIN, "TEST": TEST}
    if args.phase not in phases:
        raise unknown_name("--phase", args.phase, ("TRAIN", "TEST"))
    model = need(args.model, "model", "the prototxt of the net to time")
    with on_device(args):
        benchmark(Net(model, phases[args.phase], args.level, stages_of(args.stage)), args.iterations)
    return 0
