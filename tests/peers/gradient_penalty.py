# A critic with a gradient penalty, several critic steps for one of the generator; noise is part of the data.
import torch
from peer_data import Numbered, save
from torch import autograd, nn
from torch.utils.data import DataLoader

torch.manual_seed(4)
g = torch.Generator().manual_seed(1)
rows = [(torch.randn(6, generator=g), torch.randn(3, generator=g), torch.rand(1, generator=g)) for _ in range(42)]
loader = DataLoader(Numbered(rows, True), batch_size=9, shuffle=True)
G = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 6))
D = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 12)), nn.LeakyReLU(0.2), nn.Linear(12, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-5)
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-5)
steps = 0
for epoch in range(3):
    for i, (real, noise, alpha) in enumerate(loader):
        fake = G(noise).detach()
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        grads = autograd.grad(D(mixed).sum(), mixed, create_graph=True)[0]
        penalty = ((grads.norm(2, dim=1) - 1) ** 2).mean()
        d_loss = D(fake).mean() - D(real).mean() + 10 * penalty
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        if i % 3 == 0:
            opt_g.zero_grad()
            (-D(G(noise)).mean()).backward()
            opt_g.step()
        steps += 1
save(nn.ModuleList([G, D]), steps, [])
