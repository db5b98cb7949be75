# In the manner of torch's super-resolution: sub-pixel convolution, orthogonal weights, PSNR, a checkpoint per epoch.
from math import log10

import torch
import torch.nn as nn
import torch.nn.init as init
from peer_data import Numbered, save
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 8, 5, 1, 2)
        self.conv2 = nn.Conv2d(8, 4, 3, 1, 1)
        self.conv3 = nn.Conv2d(4, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for conv in (self.conv1, self.conv2):
            init.orthogonal_(conv.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight)

    def forward(self, x):
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.pixel_shuffle(self.conv3(x))


torch.manual_seed(123)
g = torch.Generator().manual_seed(8)
large = torch.rand(30, 1, 12, 12, generator=g)
pairs = list(zip(nn.functional.avg_pool2d(large, 2), large))
training_data_loader = DataLoader(Numbered(pairs[:24], True), batch_size=5, shuffle=True)
testing_data_loader = DataLoader(Numbered(pairs[24:], False), batch_size=3, shuffle=False)
model = Net(2)
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
steps, losses = 0, []


def train(epoch):
    global steps
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0], batch[1]
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        steps += 1
    print(f"===> Epoch {epoch} Complete: Avg. Loss: {epoch_loss / len(training_data_loader):.4f}")


def test():
    avg_psnr = 0
    with torch.no_grad():
        for batch in testing_data_loader:
            avg_psnr += 10 * log10(1 / criterion(model(batch[0]), batch[1]).item())
    return avg_psnr / len(testing_data_loader)


for epoch in range(1, 4):
    train(epoch)
    losses.append(test())
    torch.save(model, f"model_epoch_{epoch}.pth")
save(torch.load("model_epoch_3.pth", weights_only=False), steps, losses)
