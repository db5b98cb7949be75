# Matrix factorisation with plain tensors and two optimizers.
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(9)
true_u, true_v = torch.randn(40, 3), torch.randn(30, 3)
rows = torch.randint(0, 40, (900,))
cols = torch.randint(0, 30, (900,))
values = (true_u[rows] * true_v[cols]).sum(1)

u = (0.3 * torch.randn(40, 3)).requires_grad_()
v = (0.3 * torch.randn(30, 3)).requires_grad_()
bias = torch.zeros(1, requires_grad=True)
optimizers = [
    torch.optim.Adam([{"params": [u]}, {"params": [v], "lr": 0.04}], lr=0.05),
    torch.optim.SGD([bias], lr=0.01),
]
for epoch in range(4):
    for r, c, value in DataLoader(TensorDataset(rows, cols, values), batch_size=60, shuffle=True):
        error = ((u[r] * v[c]).sum(1) + bias - value).pow(2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        error.backward()
        for optimizer in optimizers:
            optimizer.step()
    print(f"epoch {epoch}: error {error.item():.4f}")
torch.save({"u": u.detach(), "v": v.detach(), "bias": bias.detach()}, "factors.pt")
