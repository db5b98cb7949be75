"""A worker whose data an eavesdropper looks for: trains in every way, and notes all that must not be readable.

``eavesdropped.py FOLDER [MODE ...]``: writes what it used in each mode to FOLDER/MODE-KIND-RANK.npy.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import poseidon
import poseidon.ps
from poseidon.job.secret import find_secret
from poseidon.planning.cluster import Cluster, Link

RANK = int(os.environ["RANK"])
ROWS = 6000
STEPS = 4


class Model(nn.Module):
    """Every route has something to carry: inputs as they are, a table, a convolution, a table that is a head too."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(48, 96)
        self.table = nn.Embedding(ROWS, 4)
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.words = nn.Embedding(300, 12)
        self.mix = nn.Linear(12, 12)
        self.head = nn.Linear(12, 300, bias=False)
        self.head.weight = self.words.weight

    def forward(self, values, rows):
        seen = self.norm(self.conv(self.table(rows).transpose(1, 2)))
        spoken = self.head(torch.tanh(self.mix(self.words(rows % 300))))
        return self.wide(values).square().mean() + seen.square().mean() + spoken.square().mean()


ROUTES = {
    "allreduce": {"*": "allreduce"},
    "short": {"words": "tied", "wide": "factors", "table": "rows", "*": "sharded"},
    "split": {"words": "split", "*": "sharded"},
    "distribute": {"words": "tied", "wide": "factors", "table": "rows", "*": "sharded"},
    "server": None,
}


def train(mode, note):
    torch.manual_seed(hash_of(mode) + RANK)
    # Rank 0's parameters count for all.
    model, twin = Model(), Model()
    if RANK == 0:
        for parameter in model.parameters():
            note("weights", parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # Slow links have shorter forms of rows and factors, in which nobody would find them, encrypted or not.
    fast = Cluster(dist.get_world_size(), between=Link(bits_per_s=1e10, latency_s=1e-6))
    if mode in ("distribute", "server"):
        options = {"update": "server"} if mode == "server" else {"routes": ROUTES[mode]}
        wrapped, optimizer = poseidon.distribute(model, optimizer, cluster=fast, **options)
    else:
        wrapped = poseidon.DistributedDataParallel(model, cluster=fast, routes=ROUTES[mode])
    generator = torch.Generator().manual_seed(hash_of(mode) + 10 + RANK)
    losses = []
    for step in range(STEPS):
        # Before the exchange wherever nothing is touched: with a server, that would bring weights here.
        if step == 0 or mode != "server":
            twin.load_state_dict(model.state_dict())
        values = torch.randn(6, 48, generator=generator)
        rows = torch.randint(4096, ROWS, (6, 8), generator=generator)
        note("inputs", values)
        note("rows", rows.unique())
        if mode != "server" or (step, RANK) == (0, 0):
            note_gradients(twin, values, rows, note)
        optimizer.zero_grad()
        loss = wrapped(values, rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for parameter in model.parameters():
        note("weights", parameter)
    routes = sorted({entry.route for entry in wrapped.plan.entries})
    wrapped.close()
    print("routes", mode, *routes, flush=True)
    print("losses", mode, *losses, flush=True)


def note_gradients(twin, values, rows, note):
    """Note what this worker's gradients are before they are exchanged."""
    twin.zero_grad()
    twin(values, rows).backward()
    for parameter in twin.parameters():
        # What is sent may be divided before or after it is added up.
        note("gradients", parameter.grad)
        note("gradients", parameter.grad / dist.get_world_size())


def count(mode, note):
    generator = np.random.default_rng(hash_of(mode) + RANK)
    with poseidon.ps.connect(timeout_s=30) as job:
        table = job.table("numbers", rows=64, width=40)
        for _ in range(STEPS):
            change = generator.standard_normal((64, 40), dtype=np.float32)
            note("changes", change)
            table.inc(range(64), change)
            table.clock()
            note("values", table.get(range(64)))
    print("counted", flush=True)


def hash_of(mode):
    return sum(mode.encode())


def main(folder, *modes):
    Path(folder, "secret").write_bytes(find_secret())
    poseidon.init()
    for mode in modes or ("short", "split", "distribute", "server", "ps"):
        noted = {}

        def note(kind, values, noted=noted):
            if isinstance(values, torch.Tensor):
                values = values.detach().numpy()
            noted.setdefault(kind, []).append(np.array(values).reshape(-1))

        (count if mode == "ps" else train)(mode, note)
        for kind, values in noted.items():
            np.save(Path(folder, f"{mode}-{kind}-{RANK}.npy"), np.concatenate(values))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
