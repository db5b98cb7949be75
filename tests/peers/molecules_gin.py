# In the manner of graph libraries: graphs of different sizes joined into one by the collate function, sum pooling.
import torch
from peer_data import Numbered, save
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(12345)
g = torch.Generator().manual_seed(7)


class Data:
    def __init__(self, **fields):
        self.__dict__.update(fields)


def molecule():
    n = int(torch.randint(3, 9, (), generator=g))
    x = torch.randn(n, 4, generator=g)
    edge_index = torch.randint(0, n, (2, 2 * n), generator=g)
    return Data(x=x, edge_index=edge_index, y=x.sum().view(1))


def collate(graphs):
    xs, edges, batch, offset = [], [], [], 0
    for number, graph in enumerate(graphs):
        xs.append(graph.x)
        edges.append(graph.edge_index + offset)
        batch.append(torch.full((len(graph.x),), number))
        offset += len(graph.x)
    y = torch.cat([graph.y for graph in graphs])
    return Data(x=torch.cat(xs), edge_index=torch.cat(edges, 1), batch=torch.cat(batch), y=y, num_graphs=len(graphs))


class GIN(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp1 = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 12))
        self.mlp2 = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
        self.lin = nn.Linear(12, 1)

    def forward(self, data):
        x = data.x
        for mlp in (self.mlp1, self.mlp2):
            src, dst = data.edge_index
            x = mlp(torch.zeros_like(x).index_add_(0, dst, x[src]) + x).relu()
        pooled = x.new_zeros(data.num_graphs, 12).index_add_(0, data.batch, x)
        return self.lin(pooled).squeeze(1)


graphs = [molecule() for _ in range(52)]
train_loader = DataLoader(Numbered(graphs[:40], True), batch_size=8, shuffle=True, collate_fn=collate)
test_loader = DataLoader(Numbered(graphs[40:], False), batch_size=8, collate_fn=collate)
model = GIN()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
steps, losses = 0, []
for epoch in range(3):
    model.train()
    total_loss = 0
    for data in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(data), data.y)
        loss.backward()
        total_loss += loss.item() * data.num_graphs
        optimizer.step()
        steps += 1
    model.eval()
    with torch.no_grad():
        losses.append(sum(float((model(data) - data.y).abs().sum()) for data in test_loader) / 12)
save(model, steps, losses)
