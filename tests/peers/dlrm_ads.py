# In the manner of DLRM: dense features, lists of categories in embedding bags with offsets, dot interactions.
import numpy as np
import torch
import torch.nn as nn
from peer_data import Numbered, device, save
from torch.utils.data import DataLoader

np.random.seed(123)
torch.manual_seed(123)
tables = [30, 50, 12]


class DLRM_Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bot_l = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU())
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, 4, mode="sum", sparse=True) for n in tables])
        self.top_l = nn.Sequential(nn.Linear(4 + 6, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())

    def forward(self, dense_x, lS_o, lS_i):
        x = self.bot_l(dense_x)
        ly = [E(indices, offsets) for E, indices, offsets in zip(self.emb_l, lS_i, lS_o)]
        T = torch.cat([x, *ly], dim=1).view(x.size(0), -1, 4)
        Z = torch.bmm(T, T.transpose(1, 2))
        li = [i for i in range(4) for _ in range(i)]
        lj = [j for i in range(4) for j in range(i)]
        return self.top_l(torch.cat([x, Z[:, li, lj]], dim=1))


def rows(count):
    for _ in range(count):
        lists = [np.random.randint(0, n, np.random.randint(1, 4)) for n in tables]
        dense = np.random.rand(5).astype("float32")
        yield dense, lists, np.float32(dense.sum() + lists[0][0] / 30 > 3.0)


def collate(samples):
    dense, lists, target = zip(*samples)
    lS_i, lS_o = [], []
    for k in range(len(tables)):
        column = [row[k] for row in lists]
        lS_i.append(torch.tensor(np.concatenate(column)))
        lS_o.append(torch.tensor(np.cumsum([0, *map(len, column[:-1])])))
    return torch.tensor(np.array(dense)), lS_o, lS_i, torch.tensor(np.array(target)).view(-1, 1)


def on_device(dense, offsets, indices):
    return dense.to(device), [one.to(device) for one in offsets], [one.to(device) for one in indices]


data = list(rows(70))
train_ld = DataLoader(Numbered(data[:50], True), batch_size=10, shuffle=False, collate_fn=collate)
test_ld = DataLoader(Numbered(data[50:], False), batch_size=10, collate_fn=collate)
dlrm = DLRM_Net().to(device)
loss_fn = nn.BCELoss(reduction="mean")
optimizer = torch.optim.SGD(dlrm.parameters(), lr=0.2)
steps, losses = 0, []
for k in range(2):
    for j, (X, lS_o, lS_i, T) in enumerate(train_ld):
        E = loss_fn(dlrm(*on_device(X, lS_o, lS_i)), T.to(device))
        optimizer.zero_grad()
        E.backward()
        optimizer.step()
        steps += 1
        if j % 3 == 2:
            with torch.no_grad():
                losses.append(sum(loss_fn(dlrm(*on_device(a, b, c)), t.to(device)).item() for a, b, c, t in test_ld))
save(dlrm, steps, losses)
