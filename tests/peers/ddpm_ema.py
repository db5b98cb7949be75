# In the manner of small diffusion repositories: a noise schedule, an average of the weights, samples drawn at the end.
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import save, seen
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(2)
T = 20
betas = torch.linspace(1e-3, 0.2, T)
alphas_bar = torch.cumprod(1 - betas, 0)


class Shapes(Dataset):
    """Images with their noise: drawn by number, so that a run can be repeated."""

    def __init__(self, count):
        self.count, self.epoch = count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        seen.append(i)
        g = torch.Generator().manual_seed(i + 1000 * self.epoch)
        image = torch.zeros(1, 8, 8)
        image[0, i % 8] = image[0, :, i // 8 % 8] = 1.0
        return image * 2 - 1, torch.randint(0, T, (), generator=g), torch.randn(1, 8, 8, generator=g)


class Denoiser(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(T, width), nn.SiLU(), nn.Linear(width, width))
        self.down = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.down(x))
        m = F.silu(self.middle(self.norm(h) + self.time(t)[:, :, None, None]))
        return self.up(torch.cat([h, m], 1))


class EMA:
    def __init__(self, model, beta):
        self.model, self.beta = copy.deepcopy(model).requires_grad_(False), beta

    def update(self, model):
        for average, new in zip(self.model.parameters(), model.parameters()):
            average.data.mul_(self.beta).add_(new.data, alpha=1 - self.beta)


dataset = Shapes(46)
loader = DataLoader(dataset, batch_size=10, shuffle=True)
model = Denoiser()
ema = EMA(model, 0.9)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
weights = 1 / (1 + torch.arange(T) / T)
steps, losses = 0, []
for epoch in range(3):
    dataset.epoch = epoch
    for x0, t, noise in loader:
        a = alphas_bar[t].view(-1, 1, 1, 1)
        predicted = model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t)
        loss = (F.mse_loss(predicted, noise, reduction="none").mean(dim=(1, 2, 3)) * weights[t]).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        ema.update(model)
        steps += 1
with torch.no_grad():
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for t in reversed(range(T)):
        e = ema.model(x, torch.full((3,), t))
        x = (x - betas[t] / (1 - alphas_bar[t]).sqrt() * e) / (1 - betas[t]).sqrt()
losses.append(x.square().mean().item())
save(nn.ModuleList([model, ema.model]), steps, losses)
