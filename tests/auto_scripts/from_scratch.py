# Softmax regression from scratch, as textbooks write it: plain tensors, no optimizer. With two workers a part of a
# batch has as many samples as there are classes, and thus as the bias has values.
import torch
from torch.utils.data import DataLoader, TensorDataset

generator = torch.Generator().manual_seed(3)
inputs = torch.randn(48, 6, generator=generator)
targets = torch.randint(0, 4, (48,), generator=generator)
torch.manual_seed(0)
weight = torch.normal(0, 0.01, size=(6, 4), requires_grad=True)
bias = torch.zeros(4, requires_grad=True)
for epoch in range(3):
    total = 0.0
    for x, y in DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True):
        scores = torch.exp(x @ weight + bias)
        loss = -torch.log((scores / scores.sum(1, keepdim=True))[range(len(y)), y]).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in (weight, bias):
                parameter -= 0.1 * parameter.grad
                parameter.grad.zero_()
        total += loss.item()
    print(f"epoch {epoch}: {total:.3f}")
torch.save({"weight": weight.detach(), "bias": bias.detach()}, "scratch.pt")
