# WeightedRandomSampler; then a sampler of batches as the sampler; focal loss; a scheduler by validation.
import torch
import torch.nn.functional as F
from peer_data import Numbered, points, save
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler


class Lists(Numbered):
    def __getitem__(self, index):
        if isinstance(index, list):
            picked = [super(Lists, self).__getitem__(i) for i in index]
            return torch.stack([x for x, _ in picked]), torch.stack([y for _, y in picked])
        return super().__getitem__(index)


def focal(logits, target, alpha=0.25, gamma=2.0):
    ce = F.cross_entropy(logits, target, reduction="none")
    pt = torch.exp(-ce)
    at = torch.where(target == 1, alpha, 1 - alpha)
    return (at * (1 - pt) ** gamma * ce).mean()


torch.manual_seed(5)
rows = points(50, 1)
labels = torch.stack([y for _, y in rows])
weights = (1.0 / torch.bincount(labels).float())[labels]
first = DataLoader(Lists(rows, True), batch_size=10, sampler=WeightedRandomSampler(weights, 44, replacement=True))
second = DataLoader(
    Lists(rows, True), batch_size=None, sampler=BatchSampler(RandomSampler(range(50)), batch_size=9, drop_last=False)
)
validation = points(20, 2)
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ELU(), torch.nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
steps, losses = 0, []
for loader in (first, second, first):
    for x, y in loader:
        optimizer.zero_grad()
        focal(model(x), y).backward()
        optimizer.step()
        steps += 1
    with torch.no_grad():
        val = F.cross_entropy(model(torch.stack([x for x, _ in validation])), torch.stack([y for _, y in validation]))
    scheduler.step(val)
    losses.append(val.item())
save(model, steps, losses)
