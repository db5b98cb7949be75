# In the manner of SimSiam: two views of each image, stopped gradients, a predictor with its own rate.
import torch
import torch.nn as nn
from peer_data import Numbered, save
from torch.utils.data import DataLoader

torch.manual_seed(0)


class TwoCrops:
    def __init__(self, count):
        self.images = torch.rand(count, 3, 10, 10, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 + i)
        a, b = torch.randint(0, 3, (2,), generator=g).tolist()
        image = self.images[i]
        return [image[:, a : a + 8, a : a + 8], image[:, b : b + 8, b : b + 8].flip(-1)], 0


class SimSiam(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 16))
        self.predictor = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))

    def forward(self, x1, x2):
        z1, z2 = self.encoder(x1), self.encoder(x2)
        return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()


model = SimSiam()
criterion = nn.CosineSimilarity(dim=1)
optim_params = [
    {"params": model.encoder.parameters(), "fix_lr": False},
    {"params": model.predictor.parameters(), "fix_lr": True},
]
optimizer = torch.optim.SGD(optim_params, 0.1, momentum=0.9, weight_decay=1e-4)
train_loader = DataLoader(Numbered(TwoCrops(45), True), batch_size=10, shuffle=True, drop_last=True)
steps = 0
for epoch in range(3):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 if group["fix_lr"] else 0.1 / (1 + epoch)
    model.train()
    for i, (images, _) in enumerate(train_loader):
        p1, p2, z1, z2 = model(x1=images[0], x2=images[1])
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
save(model, steps, [])
