# In the manner of random search in one process: configurations drawn by random, the best model kept, the rest freed.
import itertools
import random

import torch
from peer_data import Numbered, points, save
from torch import nn
from torch.utils.data import DataLoader

random.seed(1)
torch.manual_seed(1)
space = {"lr": [0.03, 0.1, 0.3], "hidden": [8, 24], "optimizer": ["sgd", "adam", "rmsprop"], "batch_size": [6, 11]}
trials = random.sample(list(itertools.product(*space.values())), 4)
train_set, val_set = Numbered(points(33, 1), True), points(20, 2)


def objective(lr, hidden, optimizer, batch_size):
    model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 2))
    make = {
        "sgd": torch.optim.SGD,
        "adam": lambda p, lr: torch.optim.Adam(p, lr / 10, eps=1e-4),
        "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr / 10, eps=1e-4),
    }
    opt = make[optimizer](model.parameters(), lr=lr)
    count = 0
    for _ in range(2):
        for x, y in DataLoader(train_set, batch_size, shuffle=True):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            count += 1
    with torch.no_grad():
        x, y = map(torch.stack, zip(*val_set))
        return nn.functional.cross_entropy(model(x), y).item(), model, count


best, losses, steps = None, [], 0
for trial in trials:
    score, model, count = objective(*trial)
    losses.append(score)
    steps += count
    if best is None or score < best[0]:
        best = score, model
save(best[1], steps, losses)
