# L-BFGS with all data in one batch, line search; then Rprop on batches.
import torch
import torch.nn.functional as F
from peer_data import Numbered, points, save
from torch.utils.data import DataLoader

torch.manual_seed(8)
data = Numbered(points(45, 1), True)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
steps = 0
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=len(data)):

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.double()), y) + 1e-3 * sum(p.abs().sum() for p in model.parameters())
            loss.backward()
            return loss

        optimizer.step(closure)
        steps += 1
second = torch.optim.Rprop(model.parameters(), lr=1e-3)
for x, y in DataLoader(data, batch_size=20):
    second.zero_grad()
    F.multi_margin_loss(model(x.double()), y).backward()
    second.step()
    steps += 1
save(model, steps, [])
