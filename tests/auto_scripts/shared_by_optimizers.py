# Several optimizers for the same parameters: one inside another, whose step is called or not, and one after the other.
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
x = torch.randn(56, 8)
y = x.sum(1, keepdim=True).tanh()
train_loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


class Around(torch.optim.Optimizer):
    def __init__(self, params, rate):
        super().__init__(params, {"lr": rate})
        self.base = torch.optim.SGD(self.param_groups, lr=rate, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self):
        self.base.step()

    def second_step(self):
        self.base.step()


around = Around(model.parameters(), 0.1)
later = torch.optim.Adam(model.parameters(), lr=0.01)
sums, losses = [], []
for step in (around.step, around.second_step, later.step):
    for inputs, targets in train_loader:
        loss = (model(inputs) - targets).square().mean()
        model.zero_grad()
        loss.backward()
        step()
        sums.append(sum(p.detach().double().sum() for p in model.parameters()).item())
    with torch.no_grad():
        losses.append((model(x) - y).square().mean().item())
torch.save({"sums": sums, "losses": losses}, "result.pt")
