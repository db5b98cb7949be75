"""What being observed costs: laps of one job in turn with and without a recorder, and the ratio of their medians.

    poseidon run --page --nproc 2 benchmarks/observing_cost.py --laps 20 --steps 30
    poseidon run --page --nproc 2 benchmarks/observing_cost.py --model resnet18 --image-size 64 --batch 8 --steps 5

Also with ``--hosts``, and on emulated machines with the page open: ``observing.sh``. Worker 0 prints the milliseconds a
step of both kinds of laps, and the ratio. ``--width`` and ``--batch`` choose the computation of a plain net, or
``--model`` a network of ``poseidon.zoo``; ``--device cuda`` the device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import poseidon
from poseidon import zoo
from poseidon.job.tell import tell
from poseidon.lab.bench_worker import prepare, settle
from poseidon.observe.recorder import Recorder

OBSERVED, PLAIN = "observed", "plain"
ORDER = (OBSERVED, PLAIN, PLAIN, OBSERVED)
"""Neighbours change places, so that a machine that becomes slower, or faster, favours neither."""


def make_net(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return what to train, and what computes the loss of the model that wraps it."""
    if not args.model:
        layers = [nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU()) for _ in range(6)]
        batch = torch.randn(args.batch, args.width, device=device)
        return nn.Sequential(*layers).to(device), lambda model: model(batch).square().mean()
    network = zoo.build(args.model, image_size=args.image_size, dropout=0.0)
    inputs, targets = network.batch(args.batch, seed=dist.get_rank() + 1, device=device)
    return network.model.to(device), lambda model: network.loss(model(*inputs), targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laps", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--model", default="", help="a network of poseidon.zoo: resnet18, vgg19, ...")
    parser.add_argument("--image-size", type=int, help="of --model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--say-laps", type=Path, help="a pipe that worker 0 tells which lap begins: o, p, or e: the end"
    )
    parser.add_argument("--output", type=Path, help="the times of all laps, as JSON")
    args = parser.parse_args()
    if "NCCL_HOSTID" in os.environ:
        # Machines of a lab share a GPU: NCCL refuses that unless it takes them for different hosts.
        os.environ["NCCL_HOSTID"] += "-" + os.environ["RANK"]
    device = prepare(args.device, args.threads, timeout_s=120.0)
    is_first = dist.get_rank() == 0
    torch.manual_seed(0)
    net, loss = make_net(args, device)
    model = poseidon.DistributedDataParallel(net, trials=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.001)

    def lap() -> float:
        settle(device)
        began = time.perf_counter()
        for _ in range(args.steps):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / args.steps

    def say(word: str) -> None:
        if is_first and args.say_laps is not None:
            pipe = os.open(args.say_laps, os.O_RDWR)
            os.write(pipe, word[:1].encode())
            os.close(pipe)

    assert model._team is not None
    watch = model._team.watch
    first = watch.recorder
    if first is not None:
        first.close()
    times: dict[str, list[float]] = {OBSERVED: [], PLAIN: []}
    for number in range(2 * args.laps + 2):
        kind = ORDER[number % 4]
        watch.recorder = Recorder(tell) if kind == OBSERVED else None
        watch.clock = None if watch.recorder is None else watch.recorder.clock
        if watch.recorder is not None and first is not None:
            # What the engine has told the first one.
            watch.recorder.ip, watch.recorder.is_async = first.ip, first.is_async
            watch.recorder.traffic = first.traffic
        say(kind)
        seconds = lap()
        if watch.recorder is not None:
            watch.recorder.close()
        if number >= 2:  # the first pair warms up
            times[kind].append(seconds)
    say("end")
    if is_first:
        report(args, times, is_heard=first is not None)
    model.close()


def report(args: argparse.Namespace, times: dict[str, list[float]], is_heard: bool) -> None:
    """Print the outcome, and write it where that was asked for."""
    on, off = (statistics.median(times[kind]) for kind in (OBSERVED, PLAIN))
    ratios = [a / b for a, b in zip(times[OBSERVED], times[PLAIN], strict=True)]
    spread = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    if not is_heard:
        print("no launcher listens: records are made, but go nowhere (poseidon run)")
    print(f"observed {on * 1e3:.3f} ms, not observed {off * 1e3:.3f} ms a step")
    print(
        f"ratio {on / off:.4f}; of neighbouring laps: median {spread[1]:.4f}, half of them {spread[0]:.4f} to "
        f"{spread[2]:.4f}",
        flush=True,
    )
    if args.output:
        options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        found = {"arguments": options, "times_s": times, "ratio": on / off, "ratio_of_neighbours": spread[1]}
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
