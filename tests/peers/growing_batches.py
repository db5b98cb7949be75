# In the manner of curriculum papers: easy samples first, batches that grow, a new loader per stage.
import torch
from peer_data import Numbered, points, save
from torch import nn
from torch.utils.data import DataLoader, Subset

torch.manual_seed(0)
full = Numbered(points(60, 1), True)
difficulty = torch.stack([x for x, _ in full.rows]).sum(1).abs()
order = torch.argsort(difficulty, descending=True)
net = nn.Sequential(nn.Linear(6, 14), nn.GELU(), nn.Linear(14, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
steps = 0
for stage, (share, size) in enumerate([(0.4, 4), (0.7, 9), (1.0, 20)]):
    chosen = Subset(full, order[: int(60 * share)].tolist())
    for epoch in range(2):
        for inputs, labels in DataLoader(chosen, batch_size=size, shuffle=True, drop_last=stage == 0):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), labels, label_smoothing=0.1)
            loss.backward()
            opt.step()
            steps += 1
save(net, steps, [])
