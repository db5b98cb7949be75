"""The programs that the cluster tests run on emulated machines: ``python jobs.py NAME``."""

import contextlib
import os
import socket
import subprocess
import sys
import time

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
PORT = 5000


def say(*words):
    print(*words, flush=True)


def address(rank):
    return f"10.77.0.{rank + 1}"


def connect(rank):
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address(rank), PORT), timeout=20)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def ring(megabytes=8):
    """Send to the next machine while receiving from the one before; say the received payload's rate."""
    with socket.create_server(("0.0.0.0", PORT)) as server:
        out = connect((RANK + 1) % WORLD)
        source, _ = server.accept()
    if os.fork() == 0:
        source.close()
        out.sendall(bytes(megabytes * 10**6))
        os._exit(0)
    out.close()
    with source:
        got = len(source.recv(1 << 16))
        began = time.monotonic()
        counted = 0
        while chunk := source.recv(1 << 20):
            counted += len(chunk)
        seconds = time.monotonic() - began
    assert got + counted == megabytes * 10**6
    say("mbit", counted * 8 / seconds / 1e6)
    os.wait()


def heartbeat():
    """Rank 0 listens to the others' heartbeats and says who is silent and who is back; its status tells the end."""
    if RANK != 0:
        with connect(0) as link, contextlib.suppress(ConnectionError):
            link.sendall(bytes([RANK]))
            while True:
                link.sendall(b"x")
                time.sleep(0.02)
        return
    links = {}
    with socket.create_server((address(0), PORT)) as server:
        while len(links) < WORLD - 1:
            link, _ = server.accept()
            links[link.recv(1)[0]] = link
    say("all here")
    silent = set()
    while True:
        for rank, link in links.items():
            link.settimeout(0.5)
            try:
                is_there = bool(link.recv(1 << 16))
            except (TimeoutError, OSError):
                is_there = False
            if not is_there and rank not in silent:
                silent.add(rank)
                say("silent", rank)
                if sys.argv[2] == "give-up":
                    sys.exit(7)
            if is_there and rank in silent:
                say("back", rank)
                sys.exit(0)


def echo():
    """Say how long a byte takes to the other machine and back."""
    if RANK == 0:
        with socket.create_server((address(0), PORT)) as server:
            link, _ = server.accept()
        with link:
            link.sendall(link.recv(1))
        return
    with connect(0) as link:
        began = time.monotonic()
        link.sendall(b"x")
        link.recv(1)
        say("round trip", time.monotonic() - began)


def daemons():
    """Leave a process behind in another session, then wait for ever."""
    sleeper = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(1000)"]
    left = subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.PIPE)
    # Popen returns while the kernel still loads the program, when it can be found by nothing it was given.
    left.stdout.readline()
    say("ready")
    time.sleep(1000)


def fail_on_one():
    if RANK == 1:
        say("something is wrong here")
        sys.exit(3)
    daemons()


def work():
    """Use the CPU for a second; say how long that took."""
    began, cpu = time.monotonic(), time.thread_time()
    while time.thread_time() - cpu < 1.0:
        pass
    say("ratio", (time.monotonic() - began))


def train():
    """Train a line on data that is spread over the machines; say the weights."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(RANK)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    inputs = torch.randn(32, 2)
    targets = inputs @ torch.tensor([[2.0], [-3.0]]) + 1.0
    for _ in range(60):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    say("weights", [round(value, 2) for value in (*model.module.weight[0].tolist(), model.module.bias.item())])
    # gloo may abort a process whose peer has already left, and one that ends its own threads while others leave.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
