# In the manner of cross-validation notebooks: a new model per fold, SubsetRandomSampler, reset_weights.
import numpy as np
import torch
from peer_data import Numbered, points, save
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler


def reset_weights(m):
    for layer in m.children():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()


torch.manual_seed(42)
dataset = Numbered(points(48, 1), True)
held_out = Numbered(dataset.rows, False)
kfold = KFold(n_splits=3, shuffle=True, random_state=0)
results, steps, networks = {}, 0, []
for fold, (train_ids, test_ids) in enumerate(kfold.split(np.arange(48))):
    trainloader = DataLoader(dataset, batch_size=10, sampler=SubsetRandomSampler(train_ids))
    testloader = DataLoader(held_out, batch_size=10, sampler=SubsetRandomSampler(test_ids))
    network = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    network.apply(reset_weights)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    for epoch in range(2):
        for i, data in enumerate(trainloader, 0):
            inputs, targets = data
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(inputs), targets)
            loss.backward()
            optimizer.step()
            steps += 1
    torch.save(network.state_dict(), f"./model-fold-{fold}.pth")
    total = 0.0
    with torch.no_grad():
        for inputs, targets in testloader:
            total += nn.functional.cross_entropy(network(inputs), targets, reduction="sum").item()
    results[fold] = total
    networks.append(network)
save(nn.ModuleList(networks), steps, list(results.values()))
