import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(4)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
loader = DataLoader(TensorDataset(x[:960], y[:960]), batch_size=48, shuffle=True)

model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device, init_scale=1024.0)
skipped = 0
for epoch in range(2):
    for step, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        if epoch == 1 and step == 3 and 0 in labels:
            loss = loss * float("inf")  # as an overflow would
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    print(f"epoch {epoch}: loss {loss.item():.4f}, skipped {skipped}")
torch.save({"model": model.state_dict(), "skipped": skipped, "scale": scaler.get_scale()}, "amp.pt")
