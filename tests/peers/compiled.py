# torch.compile around the model and around the step's loss.
import sys

import torch
import torch.nn.functional as F
from peer_data import Numbered, device, points, save
from torch.utils.data import DataLoader

torch.manual_seed(8)
backend = "aot_eager" if device == "cpu" else "inductor"
loader = DataLoader(Numbered(points(44, 1), True), batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)


def compute(x, y):
    if sys.argv[1] == "sum":
        return F.cross_entropy(model(x), y, reduction="sum") / 8
    return F.cross_entropy(model(x), y)


if sys.argv[1] == "model":
    model = torch.compile(model, backend=backend)
elif sys.argv[1] == "script":
    model = torch.jit.script(model)
elif sys.argv[1] == "inplace":
    model.compile(backend=backend)
else:
    compute = torch.compile(compute, backend=backend)
steps = 0
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        compute(x.to(device), y.to(device)).backward()
        optimizer.step()
        steps += 1
save(getattr(model, "_orig_mod", model), steps, [])
