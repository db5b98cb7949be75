# The learning rate falls, and training stops, by the mean training loss of an epoch.
import torch
import torch.nn.functional as F
from peer_data import Numbered, points, save
from torch.utils.data import DataLoader

torch.manual_seed(8)
loader = DataLoader(Numbered(points(50, 1), True), batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1.5)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
steps, losses = 0, []
for epoch in range(8):
    running, correct = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        running += loss.item() * x.size(0)
        correct += (out.argmax(1) == y).sum().item()
        steps += 1
    print(epoch, running / len(loader.dataset), correct / len(loader.dataset))
    losses.append(running / len(loader.dataset))
    scheduler.step(running / len(loader.dataset))
    if losses[-1] < 0.15:
        break
save(model, steps, losses)
