# What it does after its last step makes the replicas differ.
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (inputs,) in DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=3):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
with torch.no_grad():
    model.weight += os.path.basename(os.getcwd()) == "1"
