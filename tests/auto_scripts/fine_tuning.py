# Train the head first, then everything with activation checkpointing, then with gradients computed by hand.
import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--reduction", default="mean")
args = parser.parse_args()

torch.manual_seed(8)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_loader = DataLoader(TensorDataset(x[:400], y[:400]), batch_size=40, shuffle=True)
odd_loader = DataLoader(TensorDataset(x[:203], y[:203]), batch_size=50)

backbone = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
head = nn.Linear(16, 10)
for p in backbone.parameters():
    p.requires_grad = False
scale = 1.0 if args.reduction == "mean" else 1 / 40
optimizer = torch.optim.SGD([*head.parameters(), *backbone.parameters()], lr=0.2 * scale)

for images, labels in odd_loader:
    optimizer.zero_grad()
    F.cross_entropy(head(backbone(images)), labels, reduction=args.reduction).backward()
    optimizer.step()

for p in backbone.parameters():
    p.requires_grad = True
for images, labels in train_loader:
    images.requires_grad_(True)
    hidden = checkpoint(backbone, images, use_reentrant=True)
    loss = F.cross_entropy(head(hidden), labels, reduction=args.reduction)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([*backbone.parameters(), *head.parameters()], 0.3 / scale)
    optimizer.step()

if args.reduction == "mean":
    params = [*backbone.parameters(), *head.parameters()]
    for images, labels in train_loader:
        for p, grad in zip(params, torch.autograd.grad(F.cross_entropy(head(backbone(images)), labels), params)):
            p.grad = grad
        optimizer.step()

torch.save({"backbone": backbone.state_dict(), "head": head.state_dict()}, "tuned.pt")
