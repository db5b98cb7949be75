# A GAN on points of a circle, with the R1 gradient penalty on the discriminator.
import math

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
angles = torch.rand(512) * 2 * math.pi
points = torch.stack([angles.cos(), angles.sin()], dim=1)
loader = DataLoader(TensorDataset(points), batch_size=32, shuffle=True, drop_last=True)

G = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.99))
opt_d = optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.99))
bce = nn.BCEWithLogitsLoss()

step = 0
for epoch in range(2):
    for (real,) in loader:
        n = real.size(0)
        z = torch.randn(n, 8)

        opt_d.zero_grad()
        real.requires_grad_(True)
        score = D(real)
        loss_d = bce(score, torch.ones(n, 1)) + bce(D(G(z).detach()), torch.zeros(n, 1))
        if step % 4 == 0:
            (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
            loss_d = loss_d + 0.5 * slope.pow(2).sum(1).mean()
        loss_d.backward()
        opt_d.step()

        opt_g.zero_grad()
        loss_g = bce(D(G(z)), torch.ones(n, 1))
        loss_g.backward()
        opt_g.step()
        step += 1
    print(f"epoch {epoch}: D {loss_d.item():.3f} G {loss_g.item():.3f}")

torch.save({"G": G.state_dict(), "D": D.state_dict(), "steps": step}, "gan.pt")
