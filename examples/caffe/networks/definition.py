"""From a network's body to its files: data layers and losses for training, an input and scores for use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from poseidon.caffe import TEST, TRAIN, NetSpec
from poseidon.caffe import layers as L
from poseidon.caffe import params as P
from poseidon.caffe.net_spec import Top
from poseidon.caffe.schema import SolverParameter

FOLDER = "examples/caffe"
"""The folder of the files; Caffe resolves paths in prototxts from its working directory."""


@dataclass(frozen=True)
class Head:
    """Scores that are trained; layers computed from them have names with this ``prefix``."""

    scores: Top
    prefix: str = ""
    loss_weight: float | None = None
    in_use: bool = True
    """Whether the deployed net has it too."""


@dataclass(frozen=True)
class Network:
    """One example: the content of its three files."""

    title: str
    body: Callable[[NetSpec], list[Head]]
    """Adds layers from ``data`` to the scores."""
    crop: int
    train_batch: int
    solver: dict[str, Any]
    test_batch: int = 50
    deploy_batch: int = 10
    is_cropped: bool = True
    """Whether images are larger than what the net sees."""
    mean: dict[str, Any] = field(default_factory=lambda: {"mean_value": [104, 117, 123]})
    sources: tuple[str, str] = ("examples/imagenet/ilsvrc12_train_lmdb", "examples/imagenet/ilsvrc12_val_lmdb")
    counts_top_5: bool = True


def train_test(network: Network) -> Any:
    """Return the net for training and testing, in one file with rules for each phase."""
    n = NetSpec()
    n.data, n.label = _data(network, TRAIN)
    for head in network.body(n):
        prefix = f"{head.prefix}/" if head.prefix else ""
        weight = {} if head.loss_weight is None else {"loss_weight": head.loss_weight}
        _accuracy(n, head, prefix, network.counts_top_5)
        n[f"{prefix}loss"] = L.SoftmaxWithLoss(head.scores, n.label, **weight)
    net = n.to_proto()
    net.name = network.title
    testing = _data(network, TEST)[0].to_proto().layer[0]
    testing.name, testing.top[:] = "data", ["data", "label"]
    layers = [net.layer[0], testing, *net.layer[1:]]
    result = type(net)(name=network.title)
    result.layer.extend(layers)
    return result


def deploy(network: Network) -> Any:
    """Return the net for use: images in, probabilities out."""
    n = NetSpec()
    n.data = L.Input(shape={"dim": [network.deploy_batch, 3, network.crop, network.crop]})
    (scores,) = [head.scores for head in network.body(n) if head.in_use]
    n.prob = L.Softmax(scores)
    net = _needed_for_use(n.to_proto())
    net.name = network.title
    return net


def solver(network: Network, folder: str) -> Any:
    """Return how the net is trained."""
    where = f"{FOLDER}/{folder}"
    return SolverParameter(net=f"{where}/train_test.prototxt", snapshot_prefix=f"{where}/{folder}", **network.solver)


def _data(network: Network, phase: int) -> tuple[Top, Top]:
    is_training = phase == TRAIN
    transform = dict(network.mean)
    if network.is_cropped:
        transform |= {"mirror": is_training, "crop_size": network.crop}
    tops: tuple[Top, Top] = L.Data(
        ntop=2,
        include={"phase": phase},
        transform_param=transform,
        source=network.sources[0 if is_training else 1],
        batch_size=network.train_batch if is_training else network.test_batch,
        backend=P.Data.LMDB,
    )
    return tops


def _accuracy(n: NetSpec, head: Head, prefix: str, counts_top_5: bool) -> None:
    testing = {"phase": TEST}
    n[f"{prefix}accuracy"] = L.Accuracy(head.scores, n.label, include=testing)
    if counts_top_5:
        n[f"{prefix}accuracy_top_5"] = L.Accuracy(head.scores, n.label, include=testing, top_k=5)


def _needed_for_use(net: Any) -> Any:
    """Return the net without the layers that do not contribute to ``prob``: the heads that only help training."""
    needed = {"prob"}
    kept = []
    for layer in reversed(net.layer):
        if needed & set(layer.top):
            needed |= set(layer.bottom)
            kept.append(layer)
    result = type(net)()
    result.layer.extend(reversed(kept))
    return result
