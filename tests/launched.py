"""The program that tests of ``poseidon run`` start as workers: trains, and fails on demand.

``launched.py --steps 5 --fault raise --rank 1 --when middle``: the worker of that rank fails so, then: ``start`` is
before it has joined the others, ``middle`` is between forward and backward of a step, ``end`` is after the last step.
With ``network`` it only says which connections it has, and continues: the fault comes from outside.
"""

import argparse
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

FAULTS = ("exit", "raise", "kill", "hang", "stop", "segv", "machine", "orphan", "quit-early", "network")
MODES = ("wrapper", "sharded", "factors", "distribute", "server", "tables")
WHENS = ("start", "middle", "end")


def fail(fault, notes):
    if fault == "network":
        print("own ports:", *own_ports(), flush=True)
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


def own_ports():
    """Return the local ports of the connections that Python holds: Poseidon's own, and not gloo's or the store's."""
    for each in gc.get_objects():
        if isinstance(each, socket.socket) and each.family == socket.AF_INET:
            with contextlib.suppress(OSError):
                if each.getpeername()[0] != each.getsockname()[0]:
                    yield each.getsockname()[1]


def wait_for_ever():
    while True:
        time.sleep(1000)


def start_training(arguments):
    """Return what makes a step, given what to do between forward and backward; and what ends in good order."""
    import torch

    import poseidon

    options = {"timeout_s": arguments.timeout}
    if arguments.mode == "tables":
        return start_tables(options)
    net = torch.nn.Linear(8, 1) if arguments.mode == "wrapper" else torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), 0.05 if arguments.mode == "wrapper" else 0.001)
    routes = {} if arguments.mode in ("wrapper", "server") else {"routes": {"*": arguments.mode}}
    if arguments.mode in ("distribute", "server"):
        update = {"update": "server"} if arguments.mode == "server" else {"routes": {"*": "sharded"}}
        model, optimizer = poseidon.distribute(net, optimizer, **update, **options)
    else:
        model = poseidon.DistributedDataParallel(net, **routes, **options)

    def step(between):
        inputs = torch.randn(16, net.in_features)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        between()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, model.verify_replicas, net.parameters


def start_tables(options):
    import numpy as np

    import poseidon

    job = poseidon.ps.connect(**options)
    table = job.table("t", 16, 4)

    def step(between):
        values = table.get(range(16))
        between()
        table.inc(range(16), np.ones((16, 4)))
        table.clock()
        return float(values[0, 0])

    def check():
        steps = table.now
        found = table.get(range(16))
        assert (found == steps * len(job.workers)).all(), f"{found} after {steps} steps of {len(job.workers)} workers"
        job.close()

    return step, check, list


def train(arguments, on_fault):
    import torch

    import poseidon
    from poseidon.job import tell as report

    world = poseidon.init(timeout_s=60)
    torch.manual_seed(world.rank)
    step, check, parameters = start_training(arguments)
    loss = 0.0
    middle = arguments.steps // 2 if arguments.middle is None else arguments.middle
    for number in range(arguments.steps):
        loss = step(lambda is_middle=number == middle: on_fault("middle") if is_middle else None)
        report.tell(loss=loss)
        if number == 0:
            print("first step at", time.time(), flush=True)
        time.sleep(arguments.pause)
    if arguments.pause:
        check()
    print(f"trained {arguments.steps} steps, loss {loss:.4f}", flush=True)
    if arguments.notes is not None:
        weights = [value for parameter in parameters() for value in parameter.detach().flatten().tolist()]
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
    parser.add_argument("--mode", choices=MODES, default="wrapper")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step; then replicas are compared")
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--when", choices=WHENS, default="middle")
    parser.add_argument("--middle", type=int, help="which step is in the middle; default: half of them")
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
