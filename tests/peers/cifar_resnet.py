# In the manner of kuangliu's CIFAR repository: globals, train(epoch) and test(epoch), best accuracy, cosine, --resume.
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from peer_data import Numbered, device, save

torch.manual_seed(0)
best_acc, steps, losses = 0, 0, []


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.n1, self.n2 = nn.GroupNorm(2, planes), nn.GroupNorm(2, planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False), nn.GroupNorm(2, planes))

    def forward(self, x):
        out = self.n2(self.conv2(F.relu(self.n1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.layer1, self.layer2 = BasicBlock(4, 4), BasicBlock(4, 8, 2)
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        out = self.layer2(self.layer1(F.relu(self.conv1(x))))
        return self.linear(F.avg_pool2d(out, 4).view(x.size(0), -1))


g = torch.Generator().manual_seed(3)
pictures = torch.rand(80, 3, 8, 8, generator=g)
rows = [(p, int(p[0].mean() > 0.5) + 2 * int(p[1].mean() > 0.5)) for p in pictures]
trainloader = torch.utils.data.DataLoader(Numbered(rows[:60], True), batch_size=16, shuffle=True, num_workers=0)
testloader = torch.utils.data.DataLoader(Numbered(rows[60:], False), batch_size=10, shuffle=False, num_workers=0)
net = ResNet().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)


def train(epoch):
    global steps
    net.train()
    train_loss = correct = total = 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
        steps += 1


def test(epoch):
    global best_acc
    net.eval()
    test_loss = correct = total = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = net(inputs)
            test_loss += criterion(outputs, targets).item()
            correct += outputs.max(1)[1].eq(targets).sum().item()
            total += targets.size(0)
    acc = 100.0 * correct / total
    losses.extend([test_loss, acc])
    if acc > best_acc:
        if not os.path.isdir("checkpoint"):
            os.mkdir("checkpoint")
        torch.save({"net": net.state_dict(), "acc": acc, "epoch": epoch}, "./checkpoint/ckpt.pth")
        best_acc = acc


for epoch in range(3):
    train(epoch)
    test(epoch)
    scheduler.step()
found = torch.load("./checkpoint/ckpt.pth")
losses.append(float(found["epoch"]))
save(net, steps, losses)
