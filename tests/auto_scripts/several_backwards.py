# Steps of several backwards, of the kind that the first argument names.
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
torch.manual_seed(3)
x = torch.randn(252, 6)
y = (x[:, :1] * x[:, 1:2] - x[:, 2:3]).tanh()
loader = DataLoader(TensorDataset(x, y), batch_size=12)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
other = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
second = torch.optim.SGD(other.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=kind == "scaled")
seen = []


def loss_of(inputs, targets):
    return nn.functional.mse_loss(model(inputs), targets)


for epoch in range(3):
    for number, (a, b) in enumerate(loader):
        last = number % 4 == 3 or number + 1 == len(loader)
        if kind == "summed":  # the last group of an epoch has one batch
            loss_of(a, b).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        elif kind == "scaled":
            scaler.scale(loss_of(a, b) * (float("inf") if epoch == 1 and number == 5 else 1.0)).backward()
            if last:
                scaler.step(optimizer)
                scaler.update()
                seen.append(scaler.get_scale())
                optimizer.zero_grad(set_to_none=False)
        elif kind == "left out":  # steps that the script itself leaves out
            loss_of(a, b).backward()
            if last:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                seen.append(float(norm))
                if epoch != 1 or number != 7:
                    optimizer.step()
                optimizer.zero_grad()
        elif kind == "rival":  # what the other's loss leaves in the gradients is cleared
            optimizer.zero_grad()
            loss_of(a, b).backward()
            (model(a) - other(b)).square().mean().backward()
            optimizer.step()
            second.zero_grad()
            (other(model(a)) - b).square().mean().backward()
            second.step()
        elif kind == "ascent":  # climbs before it descends
            loss_of(a, b).backward()
            steps = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            with torch.no_grad():
                for parameter, step in zip(model.parameters(), steps):
                    parameter.add_(step)
            optimizer.zero_grad()
            loss_of(a, b).backward()
            with torch.no_grad():
                for parameter, step in zip(model.parameters(), steps):
                    parameter.sub_(step)
            optimizer.step()
            optimizer.zero_grad()
        elif kind == "limited":  # by the script itself, before a step
            loss_of(a, b).backward()
            if last:
                for parameter in model.parameters():
                    parameter.grad.data.clamp_(-0.1, 0.1)
                optimizer.step()
                optimizer.zero_grad()
        elif kind == "hidden":  # as "ascent", by the old way that leaves no trace
            loss_of(a, b).backward()
            steps = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            for parameter, step in zip(model.parameters(), steps):
                parameter.data.add_(step)
                parameter.grad.data.zero_()
            loss_of(a, b).backward()
            for parameter, step in zip(model.parameters(), steps):
                parameter.data.sub_(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        elif kind == "projected":  # gradients of two tasks that do not fight
            loss_of(a, b).backward()
            one = [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
            model(a).square().mean().backward()
            for parameter, first in zip(model.parameters(), one):
                common = (parameter.grad * first).sum().clamp(max=0) / first.square().sum()
                parameter.grad = parameter.grad + first - common * first
            optimizer.step()
            optimizer.zero_grad()
        elif kind in ("late", "late limit"):  # changes what it added up, though not at first
            loss_of(a, b).backward()
            if epoch and (number % 4 == 1 if kind == "late" else last):
                for parameter in model.parameters():
                    parameter.grad.clamp_(-0.01, 0.01)
            if last:
                optimizer.step()
                optimizer.zero_grad()
torch.save({"model": model.state_dict(), "other": other.state_dict(), "seen": torch.tensor(seen)}, "several.pt")
