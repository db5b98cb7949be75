import argparse
import json
import os
import shutil

import torch
import torch.nn as nn
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--out", default="results")
    return parser.parse_args()


def evaluate(model, loader, criterion):
    model.eval()
    loss, correct, n = 0.0, 0, 0
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            loss += criterion(out, y).item() * len(y)
            correct += (out.argmax(1) == y).sum().item()
            n += len(y)
    return loss / n, correct / n


def main():
    args = parse_args()
    torch.manual_seed(5)
    if not os.path.exists(args.out):
        os.mkdir(args.out)
    x, y = load_wine(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    x_train, x_val, y_train, y_val = train_test_split(x, y, test_size=0.3, random_state=0)
    as_set = lambda x, y: TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    train_loader = DataLoader(as_set(x_train, y_train), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(as_set(x_val, y_val), batch_size=args.batch_size)

    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.3)
    best, waited, history = float("inf"), 0, []
    for epoch in range(args.epochs):
        model.train()
        for xb, yb in train_loader:
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
        val_loss, val_acc = evaluate(model, val_loader, criterion)
        scheduler.step(val_loss)
        history.append(
            {"epoch": epoch, "val_loss": val_loss, "val_acc": val_acc, "lr": optimizer.param_groups[0]["lr"]}
        )
        torch.save(model.state_dict(), os.path.join(args.out, "checkpoint.pt"))
        if val_loss < best:
            best, waited = val_loss, 0
            shutil.copyfile(os.path.join(args.out, "checkpoint.pt"), os.path.join(args.out, "best.pt"))
        else:
            waited += 1
            if waited >= args.patience:
                print(f"stopped early after epoch {epoch}")
                break
    os.remove(os.path.join(args.out, "checkpoint.pt"))
    model.load_state_dict(torch.load(os.path.join(args.out, "best.pt")))
    val_loss, val_acc = evaluate(model, val_loader, criterion)
    assert abs(val_loss - best) < 1e-6
    with open(os.path.join(args.out, "history.json"), "w") as f:
        json.dump(history, f, indent=1)
    print(f"best validation loss {val_loss:.4f}, accuracy {val_acc:.3f}")
    print(sorted(os.listdir(args.out)))
    torch.save({"model": model.state_dict(), "epochs": len(history)}, "wine.pt")


if __name__ == "__main__":
    main()
