"""What being observed costs: laps of one job in turn with and without a recorder, and the ratio of their medians.

    poseidon run --page --nproc 2 benchmarks/observing_cost.py --laps 20 --steps 30

Also with ``--hosts``. Open the page meanwhile. Worker 0 prints the milliseconds a step of both kinds of laps, and the
ratio. ``--width`` and ``--batch`` choose the computation, ``--device cuda`` the device.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import poseidon
from poseidon.job.tell import tell
from poseidon.observe.recorder import Recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laps", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    poseidon.init()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU()) for _ in range(6)]
    net = nn.Sequential(*layers).to(args.device)
    model = poseidon.DistributedDataParallel(net, trials=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.001)
    batch = torch.randn(args.batch, args.width, device=args.device)

    def lap() -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(args.steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / args.steps

    assert model._team is not None
    watch = model._team.watch
    if watch.recorder is not None:
        watch.recorder.close()
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * args.laps + 2):
        is_observed = number % 2 == 0
        watch.recorder = Recorder(tell) if is_observed else None
        watch.clock = None if watch.recorder is None else watch.recorder.clock
        seconds = lap()
        if watch.recorder is not None:
            watch.recorder.close()
        if number >= 2:  # the first pair warms up
            times[is_observed].append(seconds)
    if dist.get_rank() == 0:
        on, off = (statistics.median(times[is_on]) for is_on in (True, False))
        ratios = [a / b for a, b in zip(times[True], times[False], strict=True)]
        print(f"observed {on * 1e3:.3f} ms, not observed {off * 1e3:.3f} ms a step")
        print(f"ratio {on / off:.4f}; of neighbouring laps: median {statistics.median(ratios):.4f}", flush=True)
    model.close()


if __name__ == "__main__":
    main()
