# What scripts for one GPU do: cuda_habits.py [prefetch] [fp16] [bf16] [norm] [fused] [compile] [resident] [graph]
# [redrawn]
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import Numbered, device, save
from torch.utils.data import DataLoader

words = set(sys.argv[1:])
torch.manual_seed(5)
g = torch.Generator().manual_seed(6)
pictures = torch.rand(96, 3, 8, 8, generator=g)
rows = [(p, int(p[0].mean() > 0.5) + 2 * int(p[1].mean() > 0.5)) for p in pictures]
is_cuda = device != "cpu"


class Prefetcher:
    """Copies the next batch on a stream of its own, as NVIDIA's examples do."""

    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream() if is_cuda else None
        self.preload()

    def preload(self):
        self.next = next(self.loader, None)
        if self.next is not None and self.stream is not None:
            with torch.cuda.stream(self.stream):
                self.next = [t.cuda(non_blocking=True) for t in self.next]

    def __iter__(self):
        while self.next is not None:
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
            batch = self.next
            if self.stream is not None:
                for t in batch:
                    t.record_stream(torch.cuda.current_stream())
            self.preload()
            yield batch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if "norm" in words else nn.Identity()
        self.fc = nn.Linear(8 * 16, 24)
        self.out = nn.Linear(24, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.out(F.relu(self.fc(x.flatten(1))))


net = Net().to(device=device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=("fused" in words and is_cuda) or None)
half = torch.float16 if "fp16" in words else torch.bfloat16
scaler = torch.amp.GradScaler(device, enabled="fp16" in words, init_scale=2.0**12)
model = torch.compile(net) if "compile" in words else net
loader = DataLoader(Numbered(rows, True), batch_size=16, shuffle=True, pin_memory=is_cuda, drop_last=True)
steps, losses = 0, []


def compute(x, y):
    with torch.autocast(device, half, enabled=bool({"fp16", "bf16"} & words)):
        return F.cross_entropy(model(x), y)


def train_step(x, y):
    loss = compute(x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


if "graph" in words:
    # The whole step as a graph, as in torch's own guide.
    static_x, static_y = torch.zeros(16, 3, 8, 8, device=device), torch.zeros(16, dtype=torch.long, device=device)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    sgd = torch.optim.SGD(net.parameters(), lr=0.05)
    with torch.cuda.stream(side):
        for _ in range(3):
            sgd.zero_grad(set_to_none=True)
            compute(static_x, static_y).backward()
            sgd.step()
    torch.cuda.current_stream().wait_stream(side)
    sgd.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        static_loss = compute(static_x, static_y)
        static_loss.backward()
        sgd.step()
whole = torch.stack([x for x, _ in rows]).to(device), torch.tensor([y for _, y in rows], device=device)
for epoch in range(3):
    net.train()
    total = torch.zeros((), device=device)
    if "resident" in words:
        # All data lies on the GPU, and a permutation there deals batches.
        order = torch.randperm(len(rows), device=device)
        batches = [(whole[0][part], whole[1][part]) for part in order.split(16)]
    else:
        batches = Prefetcher(loader) if "prefetch" in words else loader
    for x, y in batches:
        x, y = x.to(device, non_blocking=True, memory_format=torch.channels_last), y.to(device, non_blocking=True)
        if "graph" in words:
            static_x.copy_(x)
            static_y.copy_(y)
            graph.replay()
            total += static_loss
        else:
            total += train_step(x, y)
        steps += 1
    net.eval()
    with torch.inference_mode():
        losses.append(F.cross_entropy(net(whole[0]), whole[1]).item())
    if "redrawn" in words and epoch == 1:
        with torch.no_grad():  # a warm restart, whose numbers the device draws
            net.out.weight.add_(torch.randn(4, 24, device=device) / 10)
save(net, steps, losses)
