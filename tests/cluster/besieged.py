"""A worker that trains the same steps over and over while strangers try its doors, and tells how it fares.

``besieged.py FOLDER``: writes one line of JSON per round to FOLDER/RANK; ends after a round with FOLDER/stop.
"""

import json
import os
import sys
import threading
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

import poseidon
from poseidon.planning.cluster import Cluster, Link

STEPS = 10


def main(folder):
    poseidon.init()
    rank, process = dist.get_rank(), psutil.Process()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 16), nn.Flatten(), nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 8))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    cluster = Cluster(dist.get_world_size(), between=Link(1e10, 1e-6))
    wrapped = poseidon.DistributedDataParallel(
        model, cluster=cluster, routes={"0": "rows", "2": "factors", "*": "sharded"}
    )
    is_last = torch.zeros(1)
    with Path(folder, str(rank)).open("w") as report:
        number = 0
        while not is_last.item():
            model.load_state_dict(first)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            generator = torch.Generator().manual_seed(rank)
            losses = []
            for _ in range(STEPS):
                words = torch.randint(0, 500, (8, 4), generator=generator)
                optimizer.zero_grad()
                loss = wrapped(words).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item().hex())
            state = {
                "round": number,
                "losses": losses,
                "rss": process.memory_info().rss,
                "files": process.num_fds(),
                "threads": sorted(thread.name for thread in threading.enumerate()),
            }
            report.write(json.dumps(state) + "\n")
            report.flush()
            number += 1
            # Rank 0 decides, over the process group: that is the script's own.
            is_last = torch.tensor([float(Path(folder, "stop").exists())])
            dist.broadcast(is_last, 0)
    wrapped.verify_replicas()
    wrapped.close()
    dist.barrier()
    # The end of a process group may wait for threads that are of no use any more.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
