"""Train with every kind of exchange, wait for the fault that the test brings, and close; say how long that takes."""

import os
import sys
import time
from pathlib import Path

import torch

import poseidon


def start(mode):
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    options = {"timeout_s": 20.0}
    if mode == "server":
        model, optimizer = poseidon.distribute(net, optimizer, update="server", **options)
    else:
        model = poseidon.DistributedDataParallel(net, routes={"*": mode}, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    return model


poseidon.init()
models = {mode: start(mode) for mode in ("sharded", "factors", "server")}
models["sharded"].verify_replicas()
print("ready", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
for mode, model in models.items():
    began = time.monotonic()
    try:
        model.close()
    except poseidon.errors.PoseidonError as error:
        print("said", error, flush=True)
    print("closed", mode, time.monotonic() - began, flush=True)
os._exit(0)
