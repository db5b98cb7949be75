# In the manner of torch's VAE: the loss is a sum over samples and pixels. The noise comes with each sample.
import torch
from peer_data import Numbered, save
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

torch.manual_seed(1)
g = torch.Generator().manual_seed(9)
images = [(torch.rand(36, generator=g), torch.randn(3, generator=g)) for _ in range(50)]
train_loader = DataLoader(Numbered(images[:42], True), batch_size=12, shuffle=True)
test_loader = DataLoader(Numbered(images[42:], False), batch_size=8)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(36, 20), nn.Linear(20, 3), nn.Linear(20, 3)
        self.fc3, self.fc4 = nn.Linear(3, 20), nn.Linear(20, 36)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x, noise):
        mu, logvar = self.encode(x.view(-1, 36))
        return self.decode(mu + noise * torch.exp(0.5 * logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 36), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


model = VAE()
optimizer = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
steps, losses = 0, []
for epoch in range(3):
    model.train()
    for data, noise in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data, noise)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        steps += 1
    model.eval()
    total = 0
    with torch.no_grad():
        for data, noise in test_loader:
            recon, mu, logvar = model(data, noise)
            total += loss_function(recon, data, mu, logvar).item()
    losses.append(total / len(test_loader.dataset))
save(model, steps, losses)
