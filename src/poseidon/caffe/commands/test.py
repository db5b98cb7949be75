"""``poseidon test``: score a trained net on the data of its TEST phase."""

from __future__ import annotations

import argparse

from poseidon.caffe.commands.flags import add_caffe_flags, need, on_device, stages_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_caffe_flags(parser, ("model", "weights", "iterations", "gpu", "level", "stage"))


def run(args: argparse.Namespace) -> int:
    """Run the net and log its mean outputs."""
    from poseidon.caffe.pycaffe import Net
    from poseidon.caffe.schema import TEST
    from poseidon.caffe.scoring import score

    model = need(args.model, "model", "the prototxt of the net to score")
    weights = need(args.weights, "weights", "the file of its parameters, separated by commas if there are several")
    with on_device(args):
        net = Net(model, TEST, args.level, stages_of(args.stage))
        for path in weights.split(","):
            net.copy_from(path.strip())
        score(net, args.iterations)
    return 0
