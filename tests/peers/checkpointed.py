# Gradient checkpointing: checkpointed.py {reentrant,not,sequential}; labels to ignore, accumulation with a rest.
import sys

import torch
import torch.nn as nn
from peer_data import Numbered, save
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader

kind = sys.argv[1]
torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.mix(self.norm(x)))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(4)))
        self.head = nn.Linear(16, 5)

    def forward(self, ids):
        x = self.embed(ids)
        if kind == "sequential" and self.training:
            return self.head(checkpoint_sequential(self.blocks, 2, x, use_reentrant=True))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=kind == "reentrant") if self.training else block(x)
        return self.head(x)


def rows(count, seed):
    g = torch.Generator().manual_seed(seed)
    for i in range(count):
        ids = torch.randint(0, 30, (9,), generator=g)
        yield ids, torch.where(torch.arange(9) < 2 + i % 7, ids % 5, -100)


loader = DataLoader(Numbered(list(rows(40, 1)), True), batch_size=8, shuffle=True)
valid = DataLoader(Numbered(list(rows(12, 2)), False), batch_size=6)
model = Tagger()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
steps, losses, every = 0, [], 2
for epoch in range(3):
    model.train()
    for i, (ids, tags) in enumerate(loader):
        loss = criterion(model(ids).transpose(1, 2), tags) / every
        loss.backward()
        if (i + 1) % every == 0 or i + 1 == len(loader):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
    model.eval()
    with torch.no_grad():
        losses.append(sum(criterion(model(ids).transpose(1, 2), tags).item() for ids, tags in valid))
save(model, steps, losses)
