"""The program that tests of ``poseidon run`` start as workers: trains, and fails on demand.

``launched.py --steps 5 --fault raise --rank 1 --when middle``: the worker of that rank fails so, then: ``start`` is
before it has joined the others, ``middle`` is between forward and backward of a step, ``end`` is after the last step.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FAULTS = ("exit", "raise", "kill", "hang", "stop", "segv", "machine", "orphan", "quit-early")
WHENS = ("start", "middle", "end")


def fail(fault, notes):
    print("now:", fault, flush=True)
    if fault == "exit":
        os._exit(7)
    elif fault == "raise":
        raise ValueError("the reason of it all")
    elif fault in ("kill", "orphan"):
        if fault == "orphan":
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "quit-early":
        sys.exit(0)
    elif fault in ("hang", "machine"):
        if notes is not None:
            (notes / "reached").touch()
        wait_for_ever()


def wait_for_ever():
    while True:
        time.sleep(1000)


def train(arguments, on_fault):
    import torch

    import poseidon
    from poseidon.job import tell as report

    world = poseidon.init(timeout_s=60)
    torch.manual_seed(world.rank)
    model = poseidon.DistributedDataParallel(torch.nn.Linear(8, 1), timeout_s=arguments.timeout)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loss = torch.zeros(())
    for step in range(arguments.steps):
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        if step == arguments.steps // 2:
            on_fault("middle")
        loss.backward()
        optimizer.step()
        report.tell(loss=loss.item())
        if step == 0:
            print("first step at", time.time(), flush=True)
    print(f"trained {arguments.steps} steps, loss {loss.item():.4f}", flush=True)
    if arguments.notes is not None:
        weights = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
        (arguments.notes / f"weights-{world.rank}").write_text(repr(weights))
    return world


def pretend(arguments, on_fault):
    """Do what a training looks like from outside, without PyTorch; nobody ends before all have done the last step."""
    for step in range(arguments.steps):
        if step == arguments.steps // 2:
            on_fault("middle")
        print(f"step {step} loss {1 / (step + 1):.3f}", flush=True)
    if arguments.fault and arguments.when != "end" and arguments.restart == int(os.environ["POSEIDON_RESTART"]):
        wait_for_ever()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--when", choices=WHENS, default="middle")
    parser.add_argument("--restart", type=int, default=0, help="fail only in this start of the job")
    parser.add_argument("--notes", type=Path)
    parser.add_argument("--pretend", action="store_true")
    arguments = parser.parse_args()
    is_chosen = int(os.environ["RANK"]) == arguments.rank
    is_now = int(os.environ.get("POSEIDON_RESTART", "0")) == arguments.restart

    def on_fault(when):
        if arguments.fault and is_chosen and is_now and when == arguments.when:
            fail(arguments.fault, arguments.notes)

    on_fault("start")
    (pretend if arguments.pretend else train)(arguments, on_fault)
    on_fault("end")


if __name__ == "__main__":
    main()
