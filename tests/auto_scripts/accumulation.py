import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
data = load_diabetes()
inputs = torch.tensor(data.data * 20, dtype=torch.float32)
targets = torch.tensor((data.target - 150) / 80, dtype=torch.float32).unsqueeze(1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)

model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=3 * (len(loader) // 4 + 1))
accumulation_steps = 4

norms = []
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
            norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: last gradient norm {norms[-1]:.4f}")

torch.save({"model": model.state_dict(), "norms": torch.tensor(norms)}, "accumulation.pt")
