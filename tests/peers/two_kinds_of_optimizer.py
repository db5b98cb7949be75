# In the manner of recent language-model speedruns: orthogonalised updates for matrices, AdamW for the rest, in turn.
import torch
from peer_data import Numbered, save
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)


class Orthogonal(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - group["momentum"])
                x = state["m"] / (state["m"].norm() + 1e-4)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.t() @ x
                p.add_(x, alpha=-group["lr"])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(30, 12), nn.LayerNorm(12)
        self.a, self.b, self.head = nn.Linear(12, 24, bias=False), nn.Linear(24, 12, bias=False), nn.Linear(12, 30)

    def forward(self, ids):
        x = self.embed(ids).cumsum(1)
        return self.head(x + self.b(torch.relu(self.a(self.norm(x))).square()))


model = Model()
matrices = [model.a.weight, model.b.weight]
others = [p for p in model.parameters() if all(p is not m for m in matrices)]
optimizers = [Orthogonal(matrices), torch.optim.AdamW(others, lr=3e-3, eps=1e-5, betas=(0.9, 0.95))]
schedulers = [torch.optim.lr_scheduler.LambdaLR(opt, lambda it: 1 - it / 20) for opt in optimizers]
rows = torch.randint(0, 30, (45, 9), generator=torch.Generator().manual_seed(1))
loader = DataLoader(Numbered(list(rows), True), batch_size=10, shuffle=True)
steps = 0
for epoch in range(2):
    for row in loader:
        logits = model(row[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten()).backward()
        for opt, sched in zip(optimizers, schedulers):
            opt.step()
            sched.step()
        model.zero_grad(set_to_none=True)
        steps += 1
save(model, steps, [])
