# A loop with Accelerate: evaluation first and after each epoch, accumulation, clipping: accelerate_loop.py [kept]
import sys

import torch
from accelerate import Accelerator
from peer_data import Numbered, device, points, save
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.manual_seed(0)
accelerator = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
train = DataLoader(Numbered(points(45, 1), True), batch_size=8, shuffle=True)
val = DataLoader(Numbered(points(20, 2), False), batch_size=8)
model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)


def evaluate():
    model.eval()
    total = 0.0
    for x, y in val:
        with torch.no_grad():
            outputs, labels = accelerator.gather_for_metrics((model(x), y))
        total += cross_entropy(outputs, labels, reduction="sum").item()
    return total / 20


losses, steps = [evaluate()], 0
for _ in range(3):
    for x, y in train:
        model.train()
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    losses.append(evaluate())
if "kept" in sys.argv:
    accelerator.save_state("kept", safe_serialization=True)
    accelerator.save_model(model, "model")
save(accelerator.unwrap_model(model), steps, losses)
