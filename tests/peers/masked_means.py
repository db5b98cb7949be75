# Means over chosen elements: x[mask].mean(), a mean divided by a mask's sum, samples with weights.
import sys

import torch
import torch.nn.functional as F
from peer_data import Numbered, save
from torch.utils.data import DataLoader

kind = sys.argv[1]
torch.manual_seed(2)
g = torch.Generator().manual_seed(1)
rows = [
    (torch.randn(6, generator=g), torch.randn(4, generator=g), (torch.rand(4, generator=g) < 0.1 + 0.8 * (i % 7 == 0)))
    for i in range(52)
]
for x, t, m in rows[:: 2 if kind in ("clamped", "selected", "criterion", "masked", "nan") else 1]:
    m[0] = True
loader = DataLoader(Numbered(rows, True), batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
steps = 0
for epoch in range(3):
    for x, t, m in loader:
        out = model(x)
        if kind == "selected":
            loss = ((out - t) ** 2)[m].mean()
        elif kind == "criterion":
            loss = F.mse_loss(out[m], t[m])
        elif kind == "smooth":
            loss = F.smooth_l1_loss(torch.masked_select(out, m), torch.masked_select(t, m))
        elif kind == "masked":
            loss = (((out - t) ** 2) * m).sum() / m.sum()
        elif kind == "clamped":
            loss = (((out - t) ** 2) * m).sum() / m.sum().clamp(min=1).float()
        elif kind == "weighted":
            w = 1.0 + m.float().sum(1)
            loss = (w * ((out - t) ** 2).mean(1)).sum() / w.sum()
        elif kind == "normed":
            w = 1.0 + m.float().sum(1)
            loss = ((w / w.sum()) * ((out - t) ** 2).mean(1)).sum()
        elif kind == "dotted":
            w = 1.0 + m.float().sum(1)
            loss = torch.dot(w, ((out - t) ** 2).mean(1)) / w.sum()
        elif kind == "average":
            loss = ((((out - t) ** 2) * m).sum(1) / m.sum(1).clamp(min=1)).mean()
        elif kind == "bce":
            loss = F.binary_cross_entropy_with_logits(out, (t > 0).float(), weight=m.float(), reduction="sum") / m.sum()
        elif kind == "nan":
            loss = torch.nanmean(torch.where(m, (out - t) ** 2, torch.nan))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
save(model, steps, [])
