# In the manner of torch's GCN example: one graph, all nodes in every step, masks for the three splits.
import torch
from peer_data import save
from torch import nn
from torch.optim import Adam

torch.manual_seed(13)
n, features, classes = 40, 8, 3
g = torch.Generator().manual_seed(4)
x = torch.randn(n, features, generator=g)
y = x[:, :classes].argmax(1)
edges = (torch.rand(n, n, generator=g) < 0.1).float()
adj = ((edges + edges.t()) > 0).float() + torch.eye(n)
degree = adj.sum(1).pow(-0.5)
adj = degree[:, None] * adj * degree[None, :]
order = torch.randperm(n, generator=g)
idx_train, idx_val = order[:25], order[25:]


class GraphConv(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(a, b))
        self.bias = nn.Parameter(torch.zeros(b))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x, adj):
        return adj @ (x @ self.kernel) + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(features, 16), GraphConv(16, classes)

    def forward(self, x, adj):
        return nn.functional.log_softmax(self.gc2(torch.relu(self.gc1(x, adj)), adj), dim=1)


gcn = GCN()
optimizer = Adam(gcn.parameters(), lr=0.02, weight_decay=5e-4)
criterion = nn.NLLLoss()
losses = []
for epoch in range(12):
    gcn.train()
    optimizer.zero_grad()
    output = gcn(x, adj)
    criterion(output[idx_train], y[idx_train]).backward()
    optimizer.step()
    gcn.eval()
    with torch.no_grad():
        losses.append(criterion(gcn(x, adj)[idx_val], y[idx_val]).item())
save(gcn, 12, losses)
