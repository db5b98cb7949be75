# In the manner of torch's Hogwild example: processes of the script's own train one shared model: hogwild.py METHOD
import sys

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from peer_data import points
from torch.utils.data import DataLoader


def train(rank, model):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(points(40, 1), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    mp.set_start_method(sys.argv[1], force=True)
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 2)
    model.share_memory()
    processes = [mp.Process(target=train, args=(rank, model)) for rank in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
    if any(p.exitcode for p in processes):
        sys.exit(f"exit codes {[p.exitcode for p in processes]}")
