# A frozen body that is unfrozen after an epoch; accumulation with a remainder; groups added; a scheduler per batch.
import torch
import torch.nn.functional as F
from peer_data import Numbered, points, save
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(8)
torch.set_default_dtype(torch.float64)
model = nn.DataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2)))
body, head = model.module[:4], model.module[4]
for p in body.parameters():
    p.requires_grad = False
loader = DataLoader(Numbered(points(50, 1), True), batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(head.parameters(), lr=0.3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5)
accumulate, steps = 2, 0
for epoch in range(3):
    if epoch == 1:
        for p in body.parameters():
            p.requires_grad = True
        optimizer.add_param_group({"params": body.parameters(), "lr": 0.05})
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x.double()), y) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            steps += 1
save(model, steps, [])
