# Averages of weights beside training, OneCycleLR per batch, groups with rates of their own, clipping by value.
import argparse
import csv

import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import Numbered, points, save
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
torch.manual_seed(1)
whole = Numbered(points(61, 1), True)
train_set, val_set = random_split(whole, [45, 16], generator=torch.Generator().manual_seed(7))
val_rows = [whole.rows[i] for i in val_set.indices]
train_loader = DataLoader(train_set, batch_size=8, shuffle=True, num_workers=0)
val_loader = DataLoader(val_rows, batch_size=8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(16, 2))

    def forward(self, x):
        return self.head(F.gelu(self.body(x)))


net = Net().to(args.device)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
opt = torch.optim.AdamW([{"params": net.body.parameters(), "lr": 1e-3}, {"params": net.head.parameters()}], lr=1e-2)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[1e-2, 3e-2], total_steps=args.epochs * len(train_loader))
steps, losses = 0, []
with open("log.csv", "w") as f:
    log = csv.writer(f)
    for epoch in range(args.epochs):
        net.train()
        running = 0.0
        for x, y in train_loader:
            x, y = x.to(args.device), y.to(args.device)
            loss = F.cross_entropy(net(x), y, weight=torch.tensor([1.0, 3.0], device=args.device), label_smoothing=0.1)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.05)
            opt.step()
            sched.step()
            ema.update_parameters(net)
            running += loss.item()
            steps += 1
        net.eval()
        with torch.no_grad():
            pairs = ((x.to(args.device), y.to(args.device)) for x, y in val_loader)
            val = sum(F.cross_entropy(ema(x), y, reduction="sum").item() for x, y in pairs) / len(val_rows)
        losses.append(val)
        log.writerow([epoch, running / len(train_loader), val])
save(nn.ModuleList([net, ema]), steps, losses)
