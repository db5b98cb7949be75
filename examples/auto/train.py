"""An ordinary training script for one device: nothing in it knows of other workers.

python train.py                                   # on one device
poseidon run --nproc 2 --auto train.py            # on two workers of this machine
poseidon run --hosts a,b,c --auto train.py        # on three machines
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[1500:], y[1500:]), batch_size=256)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        score = accuracy(model, test_loader)
        print(f"epoch {epoch}: accuracy {score:.4f}")
        if score > best:
            best = score
            torch.save(model.state_dict(), "best.pt")


if __name__ == "__main__":
    main()
