# In the manner of micrograd's demo: raw tensors, a hinge loss, a penalty, updates by hand; batches from a loader.
import random

import torch
from peer_data import Numbered, points, save
from torch.utils.data import DataLoader

random.seed(1337)
w1 = torch.tensor([[random.uniform(-1, 1) for _ in range(6)] for _ in range(8)], requires_grad=True)
b1 = torch.zeros(8, requires_grad=True)
w2 = torch.tensor([[random.uniform(-1, 1) for _ in range(8)]], requires_grad=True)
parameters = [w1, b1, w2]
batches = DataLoader(
    Numbered(points(36, 1), True), batch_size=9, shuffle=True, generator=torch.Generator().manual_seed(0)
)
steps = 0
for k in range(3):
    for x, y in batches:
        scores = torch.relu(x @ w1.t() + b1) @ w2.t()
        hinge = torch.relu(1 - (2 * y.float() - 1) * scores.squeeze(1))
        loss = hinge.mean() + 1e-3 * sum((p * p).sum() for p in parameters)
        for p in parameters:
            p.grad = None
        loss.backward()
        rate = 1.0 - 0.3 * k
        for p in parameters:
            p.data -= rate * 0.1 * p.grad
        steps += 1
holder = torch.nn.ParameterList(parameters)
save(holder, steps, [])
