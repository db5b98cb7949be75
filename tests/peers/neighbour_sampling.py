# In the manner of GraphSAGE: a loader of node numbers whose collate function gathers neighbours: tensors of any size.
import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import save, seen
from torch.utils.data import DataLoader

torch.manual_seed(5)
NODES = 60
g = torch.Generator().manual_seed(9)
features = torch.randn(NODES, 7, generator=g)
edges = torch.randint(0, NODES, (2, 240), generator=g)
labels = (features[:, 0] + features[:, 1] > 0).long()
neighbours = [edges[1][edges[0] == node].tolist() for node in range(NODES)]


class NeighbourSampler:
    def __init__(self, hops):
        self.hops = hops

    def __call__(self, nodes):
        seen.extend(nodes) if len(nodes) and self.is_training(nodes) else None
        layers, known = [], list(nodes)
        for hop in range(self.hops):
            place = {node: i for i, node in enumerate(known)}
            found, pairs = list(known), []
            for node in known:
                for other in neighbours[node][:5]:
                    if other not in place:
                        place[other] = len(found)
                        found.append(other)
                    pairs.append((place[other], place[node]))
            layers.append((torch.tensor(pairs, dtype=torch.long).view(-1, 2).t(), len(known)))
            known = found
        return len(nodes), torch.tensor(known), layers[::-1]

    def is_training(self, nodes):
        return nodes[0] < 44


class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = ((7, 12), (12, 2))
        self.mine = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.theirs = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x, layers):
        for i, ((source, target), count) in enumerate(layers):
            summed = x.new_zeros(count, x.shape[1]).index_add(0, target, x[source])
            degree = x.new_zeros(count).index_add(0, target, torch.ones(len(target))).clamp(min=1)
            x = self.mine[i](x[:count]) + self.theirs[i](summed / degree[:, None])
            x = F.relu(x) if i == 0 else x
        return x.log_softmax(dim=-1)


train_idx, test_idx = torch.arange(44), torch.arange(44, NODES)
train_loader = DataLoader(train_idx.tolist(), batch_size=9, shuffle=True, collate_fn=NeighbourSampler(2))
test_loader = DataLoader(test_idx.tolist(), batch_size=8, collate_fn=NeighbourSampler(2))
model = Sage()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
steps, losses = 0, []
for epoch in range(3):
    model.train()
    for batch_size, n_id, layers in train_loader:
        optimizer.zero_grad()
        out = model(features[n_id], layers)
        loss = F.nll_loss(out, labels[n_id[:batch_size]])
        loss.backward()
        optimizer.step()
        steps += 1
    model.eval()
    with torch.no_grad():
        losses.append(
            sum(F.nll_loss(model(features[n], a), labels[n[:b]], reduction="sum").item() for b, n, a in test_loader)
        )
save(model, steps, losses)
