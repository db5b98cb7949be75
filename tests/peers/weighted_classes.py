# In the manner of imbalanced-data tutorials: a weighted sampler, class weights in the loss, a focal term.
import torch
from peer_data import Numbered, save
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

torch.manual_seed(0)
g = torch.Generator().manual_seed(1)
x = torch.randn(60, 6, generator=g)
y = (x[:, 0] > 0.9).long()
class_counts = torch.bincount(y)
sampler = WeightedRandomSampler((1.0 / class_counts)[y], num_samples=len(y), replacement=True)
train_loader = DataLoader(Numbered(list(zip(x, y)), True), batch_size=12, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
steps = 0
for epoch in range(3):
    for inputs, labels in train_loader:
        outputs = model(inputs)
        p = outputs.softmax(1).gather(1, labels[:, None]).squeeze(1)
        focal = ((1 - p) ** 2 * -p.log()).mean()
        loss = criterion(outputs, labels) + 0.5 * focal
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
save(model, steps, [])
