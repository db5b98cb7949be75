"""Ray Train with Poseidon: ``python ray_train.py`` on the head of a Ray cluster."""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from poseidon.trainers.ray import PoseidonConfig


def work():
    model = prepare_model(torch.nn.Linear(32, 1))  # wraps with Poseidon
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        x = torch.randn(16, 32)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.verify_replicas()
    print(f"{type(model).__module__}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    TorchTrainer(work, torch_config=PoseidonConfig(), scaling_config=ScalingConfig(num_workers=2)).fit()
