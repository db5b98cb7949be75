# In the manner of torch's MNIST example: argparse, train() and test() functions, Adadelta, StepLR.
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from peer_data import Numbered, save
from peer_data import device as chosen
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.fc1 = nn.Linear(8 * 2 * 2, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count, seed):
    g = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 8, 8, generator=g)
    return [(image, int(image.sum() * 10) % 10) for image in images]


steps = 0


def train(args, model, device, train_loader, optimizer, epoch):
    global steps
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        steps += 1
        if batch_idx % args.log_interval == 0:
            done = batch_idx * len(data)
            print(f"Train Epoch: {epoch} [{done}/{len(train_loader.dataset)}]\tLoss: {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1, keepdim=True).eq(target.view_as(output[:, :1].long())).sum().item()
    return test_loss / len(test_loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device(chosen)
    train_loader = torch.utils.data.DataLoader(Numbered(digits(90, 1), True), batch_size=args.batch_size, shuffle=True)
    test_loader = torch.utils.data.DataLoader(Numbered(digits(40, 2), False), batch_size=32)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    losses = []
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        losses.append(test(model, device, test_loader))
        scheduler.step()
    save(model, steps, losses)


if __name__ == "__main__":
    main()
