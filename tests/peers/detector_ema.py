# In the manner of a YOLO trainer: three losses times the batch size, warmup, nominal batch, parameter groups, EMA.
import math
from copy import deepcopy

import numpy as np
import torch
import torch.nn as nn
from peer_data import Numbered, save
from torch.utils.data import DataLoader

torch.manual_seed(0)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.SiLU())
        self.detect = nn.Conv2d(8, 4 + 1 + 3, 1)

    def forward(self, x):
        return self.detect(self.backbone(x)).permute(0, 2, 3, 1)


class ModelEMA:
    def __init__(self, model, decay=0.99, tau=5):
        self.ema, self.updates = deepcopy(model).eval(), 0
        self.decay = lambda x: decay * (1 - math.exp(-x / tau))
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        self.updates += 1
        d, msd = self.decay(self.updates), model.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= d
                v += (1 - d) * msd[k].detach()


class ComputeLoss:
    def __init__(self):
        self.bce_cls, self.bce_obj = nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))

    def __call__(self, p, box, obj, cls):
        lbox = (1.0 - (p[..., :4].sigmoid() * box).sum(-1)).abs().mean()
        lobj = self.bce_obj(p[..., 4], obj)
        lcls = self.bce_cls(p[..., 5:], cls)
        bs = p.shape[0]
        return (0.05 * lbox + 1.0 * lobj + 0.5 * lcls) * bs, torch.stack((lbox, lobj, lcls)).detach()


g = torch.Generator().manual_seed(5)
shapes = ((3, 8, 8), (2, 2, 4), (2, 2), (2, 2, 3))
rows = [tuple(torch.rand(shape, generator=g).round(decimals=2) for shape in shapes) for _ in range(40)]
model = Detector()
batch_size, nbs, epochs, lr0 = 8, 16, 3, 0.05
accumulate = max(round(nbs / batch_size), 1)
weights, biases = [], []
for v in model.modules():
    if hasattr(v, "bias") and isinstance(v.bias, nn.Parameter):
        biases.append(v.bias)
    if hasattr(v, "weight") and isinstance(v.weight, nn.Parameter):
        weights.append(v.weight)
optimizer = torch.optim.SGD(biases, lr=lr0, momentum=0.9, nesterov=True)
optimizer.add_param_group({"params": weights, "weight_decay": 5e-4 * batch_size * accumulate / nbs})
lf = lambda x: (1 - x / epochs) * (1.0 - 0.01) + 0.01
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lf)
ema = ModelEMA(model)
train_loader = DataLoader(Numbered(rows, True), batch_size=batch_size, shuffle=True)
nb, compute_loss, last_opt_step, steps = len(train_loader), ComputeLoss(), -1, 0
nw = nb
for epoch in range(epochs):
    model.train()
    mloss = torch.zeros(3)
    for i, (imgs, box, obj, cls) in enumerate(train_loader):
        ni = i + nb * epoch
        if ni <= nw:
            xi = [0, nw]
            accumulate = max(1, np.interp(ni, xi, [1, nbs / batch_size]).round())
            for j, x in enumerate(optimizer.param_groups):
                x["lr"] = np.interp(ni, xi, [0.1 if j == 0 else 0.0, x["initial_lr"] * lf(epoch)])
                x["momentum"] = np.interp(ni, xi, [0.8, 0.9])
        loss, loss_items = compute_loss(model(imgs), box, obj, cls)
        loss.backward()
        if ni - last_opt_step >= accumulate:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
            last_opt_step = ni
            steps += 1
        mloss = (mloss * i + loss_items) / (i + 1)
    scheduler.step()
save(nn.ModuleList([model, ema.ema]), steps, [])
