# In the manner of torch's fast neural style: a frozen network judges the output, Gram matrices, instance norm.
import torch
import torch.nn as nn
from peer_data import Numbered, save
from torch.optim import Adam
from torch.utils.data import DataLoader

torch.manual_seed(42)


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.slice1, self.slice2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3)
        for param in self.parameters():
            param.requires_grad = False

    def forward(self, x):
        first = torch.relu(self.slice1(x))
        return first, torch.relu(self.slice2(first))


def gram_matrix(y):
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


transformer = nn.Sequential(
    nn.Conv2d(3, 6, 3, padding=1, bias=False),
    nn.InstanceNorm2d(6, affine=True),
    nn.ReLU(),
    nn.Conv2d(6, 3, 3, padding=1),
)
g = torch.Generator().manual_seed(2)
images = [(torch.rand(3, 10, 10, generator=g), 0) for _ in range(26)]
train_loader = DataLoader(Numbered(images, True), batch_size=4, shuffle=True)
judge = Judge()
mse_loss = nn.MSELoss()
optimizer = Adam(transformer.parameters(), 1e-3)
style = torch.rand(3, 10, 10, generator=g).repeat(4, 1, 1, 1)
gram_style = [gram_matrix(y) for y in judge(style)]
steps = 0
for e in range(2):
    transformer.train()
    count = 0
    for batch_id, (x, _) in enumerate(train_loader):
        n_batch = len(x)
        count += n_batch
        optimizer.zero_grad()
        y = transformer(x)
        features_y, features_x = judge(y), judge(x)
        content_loss = 1e2 * mse_loss(features_y[1], features_x[1])
        style_loss = 0.0
        for ft_y, gm_s in zip(features_y, gram_style):
            style_loss += mse_loss(gram_matrix(ft_y), gm_s[:n_batch, :, :])
        style_loss *= 1e3
        total_loss = content_loss + style_loss
        total_loss.backward()
        optimizer.step()
        steps += 1
save(transformer, steps, [])
