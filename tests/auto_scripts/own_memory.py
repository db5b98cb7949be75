# Two losses weighed by learned numbers, and a memory that is replayed after each batch and after the loop.
import torch
from sklearn.datasets import load_iris
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
X, y = load_iris(return_X_y=True)
X, y = torch.tensor(X, dtype=torch.float32), torch.tensor(y)
X = (X - X.mean(0)) / X.std(0)
memory, labels = X[::19].clone(), y[::19].clone()
loader = DataLoader(TensorDataset(X, y), batch_size=17, shuffle=True)

net = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
classes, back = nn.Linear(16, 3), nn.Linear(16, 4)
sigmas = nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([*net.parameters(), *classes.parameters(), *back.parameters(), sigmas], lr=0.02)


def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def replay():
    step(cross_entropy(classes(net(memory)), labels, reduction="sum") / 10)


for epoch in range(2):
    for i, (x, target) in enumerate(loader):
        inner = net(x)
        losses = cross_entropy(classes(inner), target), mse_loss(back(inner), x, reduction="sum") / 9
        step(sum(loss / (2 * sigma.exp() ** 2) + sigma for loss, sigma in zip(losses, sigmas)))
        replay()
        if epoch == 1 and i == 4:
            break
for _ in range(3):
    replay()
models = {"net": net, "classes": classes, "back": back}
torch.save({"sigmas": sigmas.detach(), **{name: model.state_dict() for name, model in models.items()}}, "memory.pt")
