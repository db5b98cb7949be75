# In the manner of FixMatch: labelled and unlabelled batches together, confident guesses only, an average as teacher.
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import Numbered, points, save
from torch.utils.data import DataLoader

torch.manual_seed(17)
labelled = DataLoader(Numbered(points(24, 1), True), batch_size=6, shuffle=True)
unlabelled = DataLoader(Numbered(points(60, 5), True), batch_size=12, shuffle=True, drop_last=True)
valid = DataLoader(Numbered(points(20, 2), False), batch_size=10)
model = nn.Sequential(nn.Linear(6, 14), nn.ReLU(), nn.Linear(14, 2))
teacher = copy.deepcopy(model)
for p in teacher.parameters():
    p.detach_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
labelled_iter, unlabelled_iter = iter(labelled), iter(unlabelled)
steps, losses = 0, []
for step in range(14):
    try:
        x, y = next(labelled_iter)
    except StopIteration:
        labelled_iter = iter(labelled)
        x, y = next(labelled_iter)
    try:
        u, _ = next(unlabelled_iter)
    except StopIteration:
        unlabelled_iter = iter(unlabelled)
        u, _ = next(unlabelled_iter)
    model.train()
    logits_x, logits_u = model(torch.cat([x, u])).split([len(x), len(u)])
    with torch.no_grad():
        confidence, guess = teacher(u).softmax(1).max(1)
        mask = confidence.ge(0.55).float()
    loss = F.cross_entropy(logits_x, y) + (F.cross_entropy(logits_u * 0.9, guess, reduction="none") * mask).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), model.parameters()):
            old.mul_(0.8).add_(new, alpha=0.2)
    steps += 1
    if steps % 7 == 0:
        model.eval()
        with torch.no_grad():
            losses.append(sum(F.cross_entropy(model(x), y).item() for x, y in valid))
save(model, steps, losses)
