# In the manner of AMP recipes: float16 autocast, a scaler that overflows first, accumulation, clipping after unscale_.
import torch
from peer_data import Numbered, device, points, save
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device, init_scale=2.0**40, growth_interval=4)
data = DataLoader(Numbered(points(48, 1), True), batch_size=6, shuffle=True)
iters_to_accumulate, steps, scales = 2, 0, []
for epoch in range(6):
    for i, (input, target) in enumerate(data):
        input, target = input.to(device), target.to(device)
        with torch.autocast(device_type=device, dtype=torch.bfloat16 if device == "cpu" else torch.float16):
            output = net(input)
        loss = nn.functional.cross_entropy(output.float(), target) / iters_to_accumulate
        scaler.scale(loss).backward()
        if (i + 1) % iters_to_accumulate == 0:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            steps += 1
    scales.append(scaler.get_scale())
save(net, steps, scales)
