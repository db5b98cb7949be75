# Backwards of other kinds: several_backwards.py {vector,summed,pair,kept,grad,scaled}
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import Numbered, points, save
from torch.utils.data import DataLoader

kind = sys.argv[1]
torch.manual_seed(15)
loader = DataLoader(Numbered(points(45, 1), True), batch_size=10, shuffle=True)
trunk, first, second = nn.Linear(6, 12), nn.Linear(12, 2), nn.Linear(12, 1)
model = nn.ModuleList([trunk, first, second])
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
steps = 0
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        h = torch.relu(trunk(x))
        classes = F.cross_entropy(first(h), torch.where(x[:, 0] > 0.5, -100, y))
        values = F.mse_loss(second(h).squeeze(1), x.mean(1), reduction="sum") / 10
        if kind == "vector":  # a gradient for each sample's loss
            each = F.cross_entropy(first(h), y, reduction="none")
            each.backward(torch.full_like(each, 1 / len(each)))
        elif kind == "summed":
            each = F.cross_entropy(first(h), y, reduction="none") / 10
            each.backward(torch.ones_like(each))
        elif kind == "pair":
            torch.autograd.backward([classes, values])
        elif kind == "kept":
            classes.backward(retain_graph=True)
            values.backward()
        elif kind == "grad":  # one gradient asked for, as a part of the next loss
            (slope,) = torch.autograd.grad(classes, h, create_graph=True)
            (classes + 0.1 * slope.square().sum() + values).backward()
        else:
            classes.backward(torch.tensor(0.5), retain_graph=True)
            values.backward(gradient=torch.tensor(2.0))
        optimizer.step()
        steps += 1
save(model, steps, [])
