# everyday_habits.py {glance,pairs,moved,halved,hooked}: small things that many scripts do.
import sys

import torch
import torch.nn.functional as F
from peer_data import Numbered, points, save
from torch import nn
from torch.utils.data import DataLoader

(habit,) = sys.argv[1:]
torch.manual_seed(4)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
loader = DataLoader(Numbered(points(48, 1), habit != "glance"), batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
steps, losses = 0, []
if habit == "glance":
    example, _ = next(iter(loader))  # to see what a batch looks like
    print(example.shape[1:])
if habit == "hooked":
    for p in net.parameters():
        p.register_hook(lambda grad: torch.clamp(grad, -0.01, 0.01))


def loss_of(x, y):
    if habit == "halved":
        return (net(x) - F.one_hot(y, 2)).square().sum() / 2
    return F.cross_entropy(net(x), y)


for epoch in range(3):
    if habit == "pairs":
        for (a, ya), (b, yb) in zip(loader, loader):
            optimizer.zero_grad()
            loss_of(torch.lerp(a, b, 0.3), ya).backward()
            optimizer.step()
            steps += 1
    else:
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(x, y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            steps += 1
    if habit == "moved":
        # As net.cpu() and net.cuda() around a save.
        torch.save(net.double().state_dict(), "net.pt")
        net.float()
save(net, steps, losses)
