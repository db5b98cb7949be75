import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class DigitImages(Dataset):
    def __init__(self, images, labels, augment=False):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.augment and np.random.rand() < 0.5:
            image = np.roll(image, np.random.randint(-1, 2), axis=1)
        return torch.from_numpy(image).float().unsqueeze(0) / 16, int(self.labels[i])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(32 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(self.dropout(torch.flatten(x, 1)))


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def test(model, loader):
    model.eval()
    correct = sum((model(data).argmax(1) == target).sum().item() for data, target in loader)
    return correct / len(loader.dataset)


def main():
    digits = load_digits()
    train_set = DigitImages(digits.images[:1401], digits.target[:1401], augment=True)
    train_loader = DataLoader(train_set, 50, shuffle=True, num_workers=1, persistent_workers=True)
    test_loader = DataLoader(DigitImages(digits.images[1401:], digits.target[1401:]), 128)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    accuracy = 0
    for epoch in range(3):
        train(model, train_loader, optimizer)
        accuracy = test(model, test_loader)
        print("epoch", epoch, "accuracy", accuracy)
        scheduler.step()
    torch.save({"model": model.state_dict(), "accuracy": accuracy, "lr": scheduler.get_last_lr()}, "cnn.pt")


if __name__ == "__main__":
    main()
