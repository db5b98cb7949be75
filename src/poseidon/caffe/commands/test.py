"""``poseidon test``: score a trained net on the data of its TEST phase."""

from __future__ import annotations

import argparse

from poseidon.caffe.commands.flags import add_caffe_flags, need, stages_of
from poseidon.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_caffe_flags(parser, ("model", "weights", "iterations", "gpu", "level", "stage"))


def run(args: argparse.Namespace) -> int:
    """Run the net and log its mean outputs."""
    from poseidon.caffe.glog import console
    from poseidon.caffe.pycaffe import Net
    from poseidon.caffe.schema import TEST
    from poseidon.caffe.scoring import score
    from poseidon.caffe.training import check_gpus, choose_device, parse_gpus

    model = need(args.model, "model", "the prototxt of the net to score")
    weights = need(args.weights, "weights", "the file of its parameters, separated by commas if there are several")
    if args.iterations < 1:
        raise ConfigError(f"--iterations is {args.iterations}; it must be at least 1")
    gpus = parse_gpus(args.gpu)
    check_gpus(gpus, args.gpu)
    with console(log_dir=args.log_dir or None):
        choose_device(gpus or ())
        net = Net(model, TEST, args.level, stages_of(args.stage))
        for path in weights.split(","):
            net.copy_from(path.strip())
        score(net, args.iterations)
    return 0
