# Memories that training fills: memory_of_samples.py {bank,queue,centres,plain}
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import save, seen
from torch.utils.data import DataLoader, Dataset

kind = sys.argv[1]
torch.manual_seed(7)
COUNT, WIDTH = 40, 6


class Indexed(Dataset):
    x = torch.randn(COUNT, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        seen.append(i)
        return self.x[i], self.x[i] + 0.1 * self.x[i].flip(0), i % 4, i


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        if kind == "queue":
            self.register_buffer("queue", F.normalize(torch.randn(WIDTH, 16), dim=0))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        elif kind == "bank":
            self.register_buffer("bank", F.normalize(torch.randn(COUNT, WIDTH), dim=1))
        elif kind == "centres":
            self.register_buffer("centres", torch.randn(4, WIDTH))

    @torch.no_grad()
    def enqueue(self, keys):
        place = int(self.pointer)
        self.queue[:, place : place + len(keys)] = keys.T
        self.pointer[0] = (place + len(keys)) % 16

    def forward(self, x, other, label, index):
        z = F.normalize(self.encoder(x), dim=1)
        if kind == "queue":
            with torch.no_grad():
                k = F.normalize(self.encoder(other), dim=1)
            positive = (z * k).sum(1, keepdim=True)
            logits = torch.cat([positive, z @ self.queue.clone().detach()], 1) / 0.3
            self.enqueue(k)
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        if kind == "bank":
            logits = z @ self.bank.clone().T / 0.3
            with torch.no_grad():
                self.bank[index] = F.normalize(0.5 * self.bank[index] + 0.5 * z, dim=1)
            return F.cross_entropy(logits, index)
        logits = -torch.cdist(z, self.centres.clone()).square()
        with torch.no_grad():
            for k in label.unique():
                self.centres[k] = 0.9 * self.centres[k] + 0.1 * z[label == k].mean(0)
        return F.cross_entropy(logits, label)


loader = DataLoader(Indexed(), batch_size=8, shuffle=True)
model = Contrast()
bank = F.normalize(torch.randn(COUNT, WIDTH), dim=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
steps = 0
for epoch in range(3):
    for x, other, label, index in loader:
        if kind == "plain":
            z = F.normalize(model.encoder(x), dim=1)
            loss = F.cross_entropy(z @ bank.t() / 0.3, index)
        else:
            loss = model(x, other, label, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if kind == "plain":
            bank[index] = F.normalize(0.5 * bank[index] + 0.5 * z.detach(), dim=1)
        steps += 1
save(model, steps, [])
