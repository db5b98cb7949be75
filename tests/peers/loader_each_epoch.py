# Loaders made anew in every epoch: loader_each_epoch.py {split,replacement,tensors}; subsets, splits, drop_last.
import sys

import numpy as np
import torch
from peer_data import Numbered, points, save, seen
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, Subset, TensorDataset, random_split

kind = sys.argv[1]
torch.manual_seed(11)
np.random.seed(11)


def get_loaders(epoch):
    data = Numbered(points(75, 1), True)
    if kind == "split":
        train, rest = random_split(data, [0.7, 0.3], generator=torch.Generator().manual_seed(0))
        kept = np.random.permutation(len(train))[: 40 + epoch]
        return DataLoader(Subset(train, kept), batch_size=9, shuffle=True), DataLoader(rest, batch_size=8)
    if kind == "replacement":
        sampler = RandomSampler(data, replacement=True, num_samples=35)
        return DataLoader(data, batch_size=8, sampler=sampler), DataLoader(points(20, 2), batch_size=8)
    x, y = (torch.stack(column) for column in zip(*points(75, 1)))
    twice = ConcatDataset([TensorDataset(x[:40], y[:40]), TensorDataset(x[40:], y[40:])])
    return DataLoader(twice, batch_size=11, shuffle=True, drop_last=True), DataLoader(points(20, 2), batch_size=8)


def run_epoch(model, loader, optimizer=None):
    model.train(optimizer is not None)
    total, count = 0.0, 0
    with torch.set_grad_enabled(optimizer is not None):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total, count = total + loss.item() * len(y), count + len(y)
    return total / count, len(loader)


model = nn.Sequential(nn.Linear(6, 14), nn.ReLU(), nn.Linear(14, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
steps, losses = 0, []
for epoch in range(3):
    loader, held_out = get_loaders(epoch)
    _, done = run_epoch(model, loader, optimizer)
    steps += done
    read = len(seen)
    losses.append(run_epoch(model, held_out)[0])
    del seen[read:]  # those of the evaluation
save(model, steps, losses)
