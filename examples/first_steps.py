"""The script of docs/first-steps.md: start it with torchrun, in the lab, or alone."""

import torch

import poseidon

world = poseidon.init()  # rank, size, local_rank; alone: rank 0 of 1
data = torch.utils.data.TensorDataset(torch.randn(1024, 32), torch.randint(0, 10, (1024,)))
sampler = torch.utils.data.DistributedSampler(data, world.size, world.rank)
loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)

model = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
model = poseidon.DistributedDataParallel(model)  # in place of torch.nn.parallel's
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

if world.rank == 0:
    print(model.plan)  # which layer took which route, and why
