"""LoRA on a model of GPT-2's size: how much faster two emulated machines are than one. ``lora.sh`` is the command.

The weights of GPT-2 small stay as they are; adapters of rank 8 at its attention layers learn, and only they travel. A
pass takes the time of a small GPU without using the CPU (``poseidon.lab.paced``), so a few cores are enough. All
workers first train alone, each on its own; then together by torch's class, and by Poseidon's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

RANK, WARM_UP = 8, 3


def make_model(forward_ms: float, backward_ms: float):
    """Return the model, with adapters, whose passes take the given times."""
    import torch
    from torch import nn

    from poseidon import zoo
    from poseidon.lab import paced

    class Adapted(nn.Module):
        """A layer that stays as it is, and a product of two small ones that learns."""

        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, RANK, bias=False)
            self.up = nn.Linear(RANK, base.out_features, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    model = zoo.build("gpt2", dropout=0.0).model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "proj"):
            setattr(block.attention, name, Adapted(getattr(block.attention, name)))
    # Time by the size of a layer; the first block's inputs need no gradient, so its layers take none of the backward.
    large = {name: one.weight.numel() for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    total = sum(large.values())
    shares = {name: size / total for name, size in large.items() if not name.endswith(("down", "up"))}
    return paced(model, forward_ms, backward_ms, shares)


def time_steps(model, tokens, steps: int) -> tuple[float, float]:
    """Return the seconds of one step, and the bytes that this machine sends in it."""
    import torch
    from torch.nn.functional import cross_entropy

    from poseidon.lab.bench_worker import bytes_sent

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    times: list[float] = []
    before = 0
    while len(times) < steps + WARM_UP:
        if len(times) == WARM_UP:
            before = bytes_sent()
        began = time.perf_counter()
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        if not getattr(model, "is_choosing", False):  # plans are tried in the first steps
            times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_UP:]), (bytes_sent() - before) / steps


def work(arguments: argparse.Namespace) -> None:
    """Be a worker."""
    import torch

    import poseidon

    torch.set_num_threads(1)
    world = poseidon.init()
    model = make_model(arguments.forward_ms, arguments.backward_ms)
    tokens = torch.randint(50257, (1, arguments.tokens + 1), generator=torch.Generator().manual_seed(world.rank))
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = {"alone": time_steps(model, tokens, arguments.steps)}
    systems = {"ddp": torch.nn.parallel.DistributedDataParallel, "poseidon": poseidon.DistributedDataParallel}
    for name, wrap in systems.items():
        wrapped = wrap(model)
        found[name] = time_steps(wrapped, tokens, arguments.steps)
        if name == "poseidon":
            wrapped.verify_replicas()
            wrapped.close()
    if world.rank == 0:
        alone_s = found["alone"][0]
        total = sum(p.numel() for p in model.parameters())
        print(f"LoRA, rank {RANK}: {learning:,} of {total:,} parameters learn; {world.size} machines", flush=True)
        for name, (step_s, sent) in found.items():
            speedup = 1.0 if name == "alone" else world.size * alone_s / step_s
            print(
                f"{name:9} {step_s * 1e3:6.0f} ms, {sent / 1e6:6.2f} MB sent in a step: {speedup:.2f}x of one machine"
            )
        if arguments.output:
            Path(arguments.output).write_text(json.dumps(found))


def main() -> int:
    """Start the machines, or be one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=16, help="of a sample: the real work must fit into the passes")
    parser.add_argument("--forward-ms", type=float, default=300.0)
    parser.add_argument("--backward-ms", type=float, default=600.0)
    parser.add_argument("--output", help="a file for the times, as JSON")
    parser.add_argument("--timeout", type=float, default=170.0)
    parser.add_argument("--worker", action="store_true")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return 0
    from poseidon.lab import Job, Lab
    from poseidon.lab.job import JobOptions

    with Lab(machines=arguments.machines, rate=arguments.rate) as lab:
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--worker"]
        result = Job(lab, command, JobOptions(timeout_s=arguments.timeout)).run()
    if result.reason:
        print(result.reason, file=sys.stderr)
    return result.status


if __name__ == "__main__":
    sys.exit(main())
