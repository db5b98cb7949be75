# In the manner of training templates: best and last checkpoints, an interruption, --resume with everything restored.
import json
import os

import torch
from peer_data import Numbered, points, save
from torch import nn
from torch.utils.data import DataLoader


def make():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    return model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def validate(model):
    model.eval()
    with torch.no_grad():
        return sum(nn.functional.cross_entropy(model(x), y).item() for x, y in val_loader)


def run(until, resume):
    global steps
    model, optimizer, scheduler = make()
    start, best = 0, float("inf")
    if resume and os.path.isfile("last.pt"):
        found = torch.load("last.pt", weights_only=False)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        scheduler.load_state_dict(found["scheduler"])
        torch.set_rng_state(found["rng"])
        start, best = found["epoch"] + 1, found["best"]
    for epoch in range(start, until):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
        loss = validate(model)
        scheduler.step(loss)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": epoch,
            "best": min(best, loss),
        }
        torch.save(state, "last.pt.tmp")
        os.replace("last.pt.tmp", "last.pt")
        if loss < best:
            best = loss
            torch.save(model.state_dict(), "best.pt")
        with open("log.jsonl", "a") as log:
            log.write(json.dumps({"epoch": epoch, "loss": loss}) + "\n")
    return model


torch.manual_seed(5)
train_loader = DataLoader(Numbered(points(45, 1), True), batch_size=8, shuffle=True)
val_loader = DataLoader(Numbered(points(20, 2), False), batch_size=10)
steps = 0
run(2, resume=False)
torch.manual_seed(999)
model = run(5, resume=True)
with open("log.jsonl") as log:
    losses = [json.loads(line)["loss"] for line in log]
best = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
best.load_state_dict(torch.load("best.pt"))
save(nn.ModuleList([model, best]), steps, losses)
