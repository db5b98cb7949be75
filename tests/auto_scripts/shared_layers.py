# Models that share a layer, each with an optimizer of its own; one optimizer is dropped before the end.
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(45, 5)
train = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
body = nn.Linear(5, 6)
classifier = nn.Sequential(body, nn.Tanh(), nn.Linear(6, 2))
regressor = nn.Sequential(body, nn.Tanh(), nn.Linear(6, 1))
both = nn.ModuleList([classifier, regressor])
first = torch.optim.SGD(classifier.parameters(), lr=0.1, momentum=0.5)
second = torch.optim.SGD(regressor.parameters(), lr=0.1)
third = torch.optim.SGD(both.parameters(), lr=0.05)

for epoch in range(4):
    if epoch == 1:
        first = None
    if epoch == 3:
        second = None
    for x, y in train:
        if first is not None:
            first.zero_grad()
            cross_entropy(classifier(x), y).backward()
            first.step()
        if second is not None:
            second.zero_grad()
            mse_loss(regressor(x), x[:, :1]).backward()
            second.step()
        third.zero_grad()
        (cross_entropy(classifier(x), y) + mse_loss(regressor(x), x[:, :1])).backward()
        third.step()

torch.save(both.state_dict(), "shared.pt")
