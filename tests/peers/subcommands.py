# A program with subcommands: train, go on from a checkpoint, test; best by accuracy, a log as lines of JSON.
import argparse
import json
import os
from pathlib import Path

import torch
from peer_data import Numbered, points, save
from torch import nn
from torch.utils.data import DataLoader


def build():
    torch.manual_seed(18)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 2))


@torch.no_grad()
def accuracy(model):
    model.eval()
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(points(30, 2), batch_size=16))
    return hits / 30


def train(args):
    place = Path(args.out)
    place.mkdir(parents=True, exist_ok=args.resume)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)
    start, best = 0, -1.0
    if args.resume:
        state = torch.load(place / "last.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, best = state["epoch"] + 1, state["best"]
    loader = DataLoader(Numbered(points(50, 1), True), args.batch_size, shuffle=True)
    done = start * len(loader)
    for epoch in range(start, args.epochs):
        torch.manual_seed(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            done += 1
        now = accuracy(model)
        if now > best:
            best = now
            torch.save(model.state_dict(), place / "best.tmp")
            os.replace(place / "best.tmp", place / "best.pt")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "best": best}
        torch.save(state, place / "last.pt")
        with open(place / "log.jsonl", "a") as log:
            log.write(json.dumps({"epoch": epoch, "accuracy": round(now, 4), "steps": done}) + "\n")
    return model, done


def test(args):
    model = build()
    model.load_state_dict(torch.load(Path(args.out) / "best.pt"))
    return accuracy(model)


def main(words=None):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--out", default="runs_of_mine")
    training.add_argument("--epochs", type=int, default=2)
    training.add_argument("--batch-size", type=int, default=8)
    training.add_argument("--lr", type=float, default=0.02)
    training.add_argument("--resume", action="store_true")
    training.set_defaults(call=train)
    testing = commands.add_parser("test")
    testing.add_argument("--out", default="runs_of_mine")
    testing.set_defaults(call=test)
    args = parser.parse_args(words)
    return args.call(args)


if __name__ == "__main__":
    main()
    model, steps = main(["train", "--resume", "--epochs", "4"])
    save(model, steps, [main(["test"])])
