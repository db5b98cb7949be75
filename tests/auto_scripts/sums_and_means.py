# A mean, two sums that are divided by the batch's size, and a sum; the last batch has a single sample.
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 10
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(41, 6, generator=generator)
targets = torch.randint(0, 4, (41,), generator=generator)
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for x, y in DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True):
        out = net(x)
        sums = F.mse_loss(out, x[:, :4], reduction="sum") + 0.1 * (out.exp() - out).sum()
        loss = F.cross_entropy(out, y) + sums / BATCH + 1e-2 * out.abs().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
torch.save(net.state_dict(), "sums.pt")
