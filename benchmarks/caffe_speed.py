"""Images per second of a Caffe solver beside a plain PyTorch loop of the same net, on the CPU or a GPU.

::

    python benchmarks/caffe_speed.py [--nets caffenet,googlenet] [--batch 16] [--rounds 7]
    python benchmarks/caffe_speed.py --gpu --batch 64
    python benchmarks/caffe_speed.py --profile        # where the Python of one iteration is: for a busy machine

The plain net is made of ``torch.nn`` modules by the same prototxt, starts with the same weights, and is trained by
``torch.optim.SGD``; the first losses are compared. Input is in memory, so that only nets and updates count. Both run in
turns, an iteration each; the medians count, and the processor's time, which says more on a busy machine.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poseidon.caffe as caffe
from poseidon.caffe.schema.messages import LayerParameter, NetParameter, PoolingParameter
from poseidon.caffe.upgrade import read_net

EXAMPLES = Path(__file__).parents[1] / "examples" / "caffe"
IMAGE = {"caffenet": 227, "googlenet": 224, "alexnet": 227}
CLASSES = 1000
RATE, MOMENTUM, DECAY = 1e-4, 0.9, 5e-4


def training_net(name: str, batch: int, dropout: bool) -> NetParameter:
    """Return the training net of an example with inputs in place of its database."""
    source = read_net(EXAMPLES / name / "train_test.prototxt")
    net = NetParameter(name=name)
    for top, shape in (("data", (batch, 3, IMAGE[name], IMAGE[name])), ("label", (batch,))):
        net.layer.add(name=top, type="Input", top=[top]).input_param.shape.add(dim=shape)
    for layer in source.layer:
        is_for_tests = any(rule.HasField("phase") and rule.phase == caffe.TEST for rule in layer.include)
        if layer.type in ("Data", "Accuracy") or is_for_tests:
            continue
        copy = net.layer.add()
        copy.CopyFrom(layer)
        if copy.type == "Dropout" and not dropout:
            copy.dropout_param.dropout_ratio = 0.0
    return net


class Plain(nn.Module):
    """The net as somebody would write it in PyTorch; every step names its module, its inputs and its output."""

    def __init__(self, net: NetParameter, trained: Any) -> None:
        super().__init__()
        self.steps: list[tuple[nn.Module, Sequence[str], str]] = []
        self.losses: list[tuple[str, float]] = []
        for number, layer in enumerate(net.layer):
            if layer.type == "Input":
                continue
            if layer.type == "SoftmaxWithLoss":
                self.losses.append((layer.bottom[0], layer.loss_weight[0] if layer.loss_weight else 1.0))
                continue
            module = module_of(layer, trained)
            self.add_module(f"{number}", module)
            self.steps.append((module, list(layer.bottom), layer.top[0]))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        blobs = {"data": images}
        for module, bottoms, top in self.steps:
            blobs[top] = module(*[blobs[name] for name in bottoms])
        parts = [weight * nn.functional.cross_entropy(blobs[name], labels) for name, weight in self.losses]
        return torch.stack(parts).sum()


class Concat(nn.Module):
    """Channels side by side."""

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        """Return one tensor of all."""
        return torch.cat(parts, 1)


def module_of(layer: LayerParameter, trained: Any) -> nn.Module:
    """Return a layer's module with the weights of the trained net."""
    made: nn.Module
    if layer.type == "Convolution":
        param = layer.convolution_param
        out, per_group = trained.params[layer.name][0].data.shape[:2]
        pad, stride = (value[0] if value else default for value, default in ((param.pad, 0), (param.stride, 1)))
        made = nn.Conv2d(
            per_group * param.group, out, param.kernel_size[0], stride, pad, groups=param.group, bias=param.bias_term
        )
    elif layer.type == "InnerProduct":
        out, width = trained.params[layer.name][0].data.shape
        made = nn.Sequential(nn.Flatten(), nn.Linear(width, out))
    elif layer.type == "Pooling":
        param = layer.pooling_param
        is_max = param.pool == PoolingParameter.MAX
        options: dict[str, Any] = {"stride": param.stride, "padding": param.pad, "ceil_mode": True}
        made = nn.MaxPool2d(param.kernel_size, **options) if is_max else nn.AvgPool2d(param.kernel_size, **options)
    elif layer.type == "LRN":
        param = layer.lrn_param
        made = nn.LocalResponseNorm(param.local_size, param.alpha, param.beta, param.k)
    else:
        ratio = layer.dropout_param.dropout_ratio
        made = {"ReLU": nn.ReLU(inplace=True), "Dropout": nn.Dropout(ratio), "Concat": Concat()}[layer.type]
    with torch.no_grad():
        for mine, theirs in zip(made.parameters(), trained.params.get(layer.name, ()), strict=True):
            mine.copy_(torch.from_numpy(theirs.data))
    return made


class Pair:
    """The same net twice: a Caffe solver and a plain loop."""

    def __init__(self, name: str, batch: int, dropout: bool, on_gpu: bool, channels_last: bool) -> None:
        device = torch.device("cuda" if on_gpu else "cpu")
        net = training_net(name, batch, dropout)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "net.prototxt").write_text(str(net))
            (Path(folder) / "solver.prototxt").write_text(
                f'net: "{folder}/net.prototxt" base_lr: {RATE} lr_policy: "fixed" momentum: {MOMENTUM} '
                f'weight_decay: {DECAY} max_iter: 1000000 random_seed: 1 snapshot_prefix: "{folder}/x" '
                f"solver_mode: {'GPU' if on_gpu else 'CPU'}"
            )
            self.solver = caffe.get_solver(f"{folder}/solver.prototxt")
        images = torch.randn(batch, 3, IMAGE[name], IMAGE[name]) * 50
        labels = torch.randint(CLASSES, (batch,))
        self.solver.net.blobs["data"].data[...] = images.numpy()
        self.solver.net.blobs["label"].data[...] = labels.numpy()
        self.plain = Plain(net, self.solver.net).to(device).train()
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.plain = self.plain.to(memory_format=layout)  # type: ignore[call-overload]
        self.images, self.labels = images.to(device).contiguous(memory_format=layout), labels.to(device)
        weights = [{"params": list(self.plain.parameters()), "lr": RATE}]
        self.optimizer = torch.optim.SGD(weights, RATE, MOMENTUM, weight_decay=DECAY)
        self.on_gpu = on_gpu

    def caffe_step(self) -> float:
        """Train by one iteration of the solver; return the loss."""
        self.solver.step(1)
        return float(self.solver.smoothed_loss)

    def plain_step(self) -> float:
        """Train by one step of the plain loop; return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.plain(self.images, self.labels)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def timed(self, step: Callable[[], float]) -> tuple[float, float]:
        """Return seconds and seconds of the processor of one step."""
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - wall, time.process_time() - cpu


def compare(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Run both in turns; return the figures."""
    first = Pair(name, min(args.batch, 4), False, args.gpu, args.channels_last)
    ours, theirs = first.caffe_step(), first.plain_step()
    if abs(ours - theirs) > 1e-3 * abs(theirs):
        raise SystemExit(f"{name}: the nets differ: losses {ours:g} and {theirs:g}")
    del first
    pair = Pair(name, args.batch, True, args.gpu, args.channels_last)
    steps = {"caffe": pair.caffe_step, "plain": pair.plain_step}
    for step in steps.values():
        step()
        step()
    times: dict[str, list[tuple[float, float]]] = {which: [] for which in steps}
    for number in range(args.rounds):
        for which in sorted(steps, reverse=bool(number % 2)):
            times[which].append(pair.timed(steps[which]))
    wall = {which: statistics.median(one for one, _ in found) for which, found in times.items()}
    cpu = {which: statistics.median(one for _, one in found) for which, found in times.items()}
    return {
        "batch": args.batch,
        "loss": ours,
        "caffe_images_per_s": args.batch / wall["caffe"],
        "plain_images_per_s": args.batch / wall["plain"],
        "time_ratio": wall["caffe"] / wall["plain"],
        "processor_ratio": cpu["caffe"] / cpu["plain"],
    }


def profile(name: str, args: argparse.Namespace) -> None:
    """Say how much Python an iteration of each executes: calls, and seconds outside of torch's kernels at batch 1."""
    pair = Pair(name, 1, True, args.gpu, args.channels_last)
    for which, step in (("caffe", pair.caffe_step), ("plain", pair.plain_step)):
        step()
        step()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(3):
            step()
        profiler.disable()
        stats = pstats.Stats(profiler)
        own = {key: value for key, value in stats.stats.items() if key[0] != "~"}  # type: ignore[attr-defined]
        calls, seconds = sum(one[0] for one in own.values()) / 3, sum(one[2] for one in own.values()) / 3
        total = stats.total_tt / 3  # type: ignore[attr-defined]
        print(
            f"{name} {which}: {calls:.0f} calls of Python functions an iteration, {1e3 * seconds:.1f} of "
            f"{1e3 * total:.1f} ms in them"
        )
        if args.profile and which == "caffe":
            stats.sort_stats("tottime").print_stats(args.lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="caffenet,googlenet")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--channels-last", action="store_true", help="for the plain net")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--lines", type=int, default=12, help="of the profile")
    args = parser.parse_args()
    (caffe.set_mode_gpu if args.gpu else caffe.set_mode_cpu)()
    figures = {}
    for name in args.nets.split(","):
        if args.profile:
            profile(name, args)
            continue
        figures[name] = compare(name, args)
        one = figures[name]
        print(
            f"{name}, batch {args.batch}: {one['caffe_images_per_s']:.1f} images/s, plain PyTorch "
            f"{one['plain_images_per_s']:.1f}; {one['time_ratio']:.3f} of its time, {one['processor_ratio']:.3f} of its"
            " processor time"
        )
    if figures:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
