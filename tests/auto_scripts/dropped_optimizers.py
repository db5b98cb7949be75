# Trains in functions that drop their optimizers: before the model, or a part of it, is used, and before another one
# trains it further. Copies the model, and writes it as a whole.
import copy
import io

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
x = torch.randn(56, 8)
y = x.sum(1, keepdim=True).tanh()
train_loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def fit(rate):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for inputs, targets in train_loader:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return [p.detach().clone() for p in model.parameters()]


@torch.no_grad()
def evaluate(part):
    return part(x).square().mean().item()


fit(0.1)
losses = [evaluate(model)]
fit(0.1)
losses.append(evaluate(model[0]))
fit(0.1)
losses.append(float(model[0].state_dict()["weight"].sum()))
fit(0.1)
losses.append(evaluate(copy.deepcopy(model)))
trained = fit(0.1)
fit(0.0)
losses.append(evaluate(model))
torch.save(model, written := io.BytesIO())
result = {"losses": losses, "trained": trained, "model": list(model.parameters()), "written": written.getvalue()}
torch.save(result, "result.pt")
