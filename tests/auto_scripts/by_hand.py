# Everything by hand: no optimizer, first with plain tensors, then with a module; an attack on the inputs on the way.
import torch
from sklearn.datasets import load_iris
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)
X, y = load_iris(return_X_y=True)
X, y = torch.tensor(X, dtype=torch.float32), torch.tensor(y)
X = (X - X.mean(0)) / X.std(0)
loader = DataLoader(TensorDataset(X, y), batch_size=30, shuffle=True)

w1 = torch.randn(4, 16).mul(0.5).requires_grad_()
b1 = torch.zeros(16, requires_grad=True)
w2 = torch.randn(16, 3).mul(0.3).requires_grad_()
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
lr = 0.2
for epoch in range(3):
    for x, target in loader:
        loss = nn.functional.cross_entropy(torch.relu(x @ w1 + b1) @ w2, target)
        loss.backward()
        with torch.no_grad():
            for p in (w1, b1, w2):
                p -= lr * p.grad
                p.grad = None
    print(f"tensors, epoch {epoch}: loss {loss.item():.4f}")

for epoch in range(3):
    for x, target in loader:
        x.requires_grad_(True)
        nn.functional.cross_entropy(net(x), target).backward()
        attacked = (x + 0.05 * x.grad.sign()).detach()
        net.zero_grad()
        nn.functional.cross_entropy(net(attacked), target).backward()
        for p in net.parameters():
            p.data -= lr * p.grad.data
        net.zero_grad()
    print(f"module, epoch {epoch}")
torch.save({"w1": w1.detach(), "b1": b1.detach(), "w2": w2.detach(), "net": net.state_dict()}, "by_hand.pt")
