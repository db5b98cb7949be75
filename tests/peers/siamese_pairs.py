# In the manner of torch's siamese network: pairs of images, one encoder used twice, binary cross entropy.
import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import Numbered, save
from torch.utils.data import DataLoader

torch.manual_seed(1)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
        self.fc = nn.Sequential(nn.Linear(20, 12), nn.ReLU(inplace=True), nn.Linear(12, 1))
        self.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward(self, input1, input2):
        output = torch.cat((self.encoder(input1), self.encoder(input2)), 1)
        return torch.sigmoid(self.fc(output))


g = torch.Generator().manual_seed(3)
pairs = []
for i in range(60):
    a = torch.randn(1, 8, 8, generator=g)
    same = i % 2
    b = a + 0.1 * torch.randn(1, 8, 8, generator=g) if same else torch.randn(1, 8, 8, generator=g)
    pairs.append((a, b, torch.tensor(float(same))))
train_loader = DataLoader(Numbered(pairs[:45], True), batch_size=10, shuffle=True)
test_loader = DataLoader(Numbered(pairs[45:], False), batch_size=10)
model = SiameseNetwork()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
criterion = nn.BCELoss()
steps, losses = 0, []
for epoch in range(3):
    model.train()
    for images_1, images_2, targets in train_loader:
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze(1)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        steps += 1
    model.eval()
    with torch.no_grad():
        losses.append(sum(F.binary_cross_entropy(model(a, b).squeeze(1), t).item() for a, b, t in test_loader))
save(model, steps, losses)
