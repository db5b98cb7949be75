# An IterableDataset that loader processes share out by get_worker_info.
import torch
import torch.nn.functional as F
from peer_data import points, save
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from self.rows[start::step]


torch.manual_seed(8)
train_loader = DataLoader(Stream(points(48, 1)), batch_size=8, num_workers=2)
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
steps = 0
for epoch in range(2):
    for x, y in train_loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps += 1
save(model, steps, [])
