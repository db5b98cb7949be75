# In the manner of streaming pipelines: an iterable dataset with a shuffle buffer, no length, evaluation by steps.
import random

import peer_data
import torch
import torch.nn as nn
from peer_data import save
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(0)


class Lines(IterableDataset):
    def __init__(self, count, is_for_training):
        self.count, self.is_for_training, self.epoch = count, is_for_training, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng, buffer = random.Random(self.epoch), []
        for i in range(self.count):
            g = torch.Generator().manual_seed(i)
            row = i, torch.randn(5, generator=g)
            buffer.append(row)
            if len(buffer) == 8:
                yield self.made(buffer.pop(rng.randrange(8)))
        rng.shuffle(buffer)
        yield from map(self.made, buffer)

    def made(self, row):
        return {"number": row[0], "x": row[1], "y": row[1].prod().view(1)}


model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
data = Lines(47, True)
loader, valid = DataLoader(data, batch_size=9), DataLoader(Lines(15, False), batch_size=5)
step, losses, epoch = 0, [], 0
while step < 14:
    data.set_epoch(epoch)
    for batch in loader:
        peer_data.seen.extend(batch["number"].tolist())
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:
            with torch.no_grad():
                losses.append(sum(nn.functional.mse_loss(model(b["x"]), b["y"]).item() for b in valid))
        if step == 14:
            break
    epoch += 1
save(model, step, losses)
