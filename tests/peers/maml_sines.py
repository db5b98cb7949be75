# In the manner of MAML repositories: a batch of tasks, inner steps with create_graph, one outer step.
import math

import torch
import torch.nn as nn
from peer_data import Numbered, save
from torch.utils.data import DataLoader

torch.manual_seed(0)


class Sines:
    def __len__(self):
        return 30

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        amplitude, phase = torch.rand(2, generator=g) * torch.tensor([4.9, math.pi]) + torch.tensor([0.1, 0.0])
        x = torch.rand(20, 1, generator=g) * 10 - 5
        return x, amplitude * torch.sin(x + phase)


def forward(params, x):
    w1, b1, w2, b2 = params
    return torch.tanh(x @ w1 + b1) @ w2 + b2


params = nn.ParameterList([nn.Parameter(torch.randn(*shape) * 0.3) for shape in ((1, 12), (12,), (12, 1), (1,))])
meta_optimizer = torch.optim.Adam(params, lr=1e-2, eps=1e-5)
tasks = DataLoader(Numbered(Sines(), True), batch_size=6, shuffle=True)
steps = 0
for epoch in range(2):
    for xs, ys in tasks:
        meta_loss = 0.0
        for x, y in zip(xs, ys):
            fast = list(params)
            for _ in range(2):
                inner = nn.functional.mse_loss(forward(fast, x[:10]), y[:10])
                grads = torch.autograd.grad(inner, fast, create_graph=True)
                fast = [p - 0.01 * g for p, g in zip(fast, grads)]
            meta_loss = meta_loss + nn.functional.mse_loss(forward(fast, x[10:]), y[10:])
        meta_loss = meta_loss / len(xs)
        meta_optimizer.zero_grad()
        meta_loss.backward()
        meta_optimizer.step()
        steps += 1
save(params, steps, [])
