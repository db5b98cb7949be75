# Two trainings, one after the other. What divides the first is a constant, and in the second the number of samples.
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

generator = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 4, (48,), generator=generator))


def train(batch_size, divide):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=batch_size, shuffle=True):
            optimizer.zero_grad()
            divide(F.cross_entropy(net(x), y, reduction="sum"), x).backward()
            optimizer.step()
    return net


train(4, lambda loss, _: loss / 4)
net = train(8, lambda loss, x: loss / len(x))
print("trained twice")
torch.save(net.state_dict(), "second.pt")
