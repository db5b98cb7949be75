# In the manner of torch's DCGAN: two networks, two backwards for the critic, one for the generator; noise in the data.
import torch
import torch.nn as nn
from peer_data import Numbered, device, save
from torch.utils.data import DataLoader

torch.manual_seed(999)
g = torch.Generator().manual_seed(1)
rows = [(torch.randn(1, 8, 8, generator=g), torch.randn(6, 1, 1, generator=g)) for _ in range(40)]
dataloader = DataLoader(Numbered(rows, True), batch_size=8, shuffle=True)


def weights_init(m):
    if m.__class__.__name__.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.1)


netG = nn.Sequential(
    nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False), nn.ReLU(True), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh()
).to(device)
netD = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid()
).to(device)
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
optimizerD = torch.optim.SGD(netD.parameters(), lr=0.05, momentum=0.5)
optimizerG = torch.optim.SGD(netG.parameters(), lr=0.05, momentum=0.5)
real_label, fake_label, steps = 1.0, 0.0, 0
for epoch in range(2):
    for i, (real, noise) in enumerate(dataloader, 0):
        real, noise = real.to(device), noise.to(device)
        netD.zero_grad()
        label = torch.full((real.size(0),), real_label, device=device)
        errD_real = criterion(netD(real).view(-1), label)
        errD_real.backward()
        fake = netG(noise)
        label.fill_(fake_label)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(real_label)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
        steps += 1
        if i % 3 == 0:
            print(f"[{epoch}][{i}/{len(dataloader)}] Loss_D: {(errD_real + errD_fake).item():.4f}")
save(nn.ModuleList([netD, netG]), steps, [])
