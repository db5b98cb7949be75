# An optimizer of one's own with two backwards for each batch (SAM), and one that looks ahead around it.
import torch
import torch.nn as nn
from peer_data import Numbered, points, save
from torch.utils.data import DataLoader

torch.manual_seed(14)


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


class Lookahead:
    def __init__(self, optimizer, k=3, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.slow = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def sync(self):
        self.count += 1
        if self.count % self.k == 0:
            fast = [p for group in self.optimizer.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast):
                slow.add_(p - slow, alpha=self.alpha)
                p.copy_(slow)


loader = DataLoader(Numbered(points(43, 1), True), batch_size=9, shuffle=True)
valid = DataLoader(Numbered(points(20, 2), False), batch_size=10)
model = nn.Sequential(nn.Linear(6, 14), nn.ReLU(), nn.Linear(14, 2))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.2, momentum=0.9)
lookahead = Lookahead(optimizer)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
steps, losses = 0, []
for epoch in range(3):
    model.train()
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.first_step(zero_grad=True)
        criterion(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
        lookahead.sync()
        steps += 1
    model.eval()
    with torch.no_grad():
        losses.append(sum(criterion(model(x), y).item() for x, y in valid))
save(model, steps, losses)
