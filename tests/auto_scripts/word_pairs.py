# Train the tables of a word2vec: they get the first gradients of a backward, and nothing else gets any.

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
WORDS = 400
pairs = torch.randint(0, WORDS, (240, 3))
words, contexts = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8)
optimizer = torch.optim.Adam([*words.parameters(), *contexts.parameters()], lr=0.01, eps=1e-3)
for _ in range(2):
    for (batch,) in DataLoader(TensorDataset(pairs), batch_size=24):
        near = (words(batch[:, 0]) * contexts(batch[:, 1])).sum(1)
        far = (words(batch[:, 0]) * contexts(batch[:, 2])).sum(1)
        loss = F.softplus(far - near).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
torch.save({"words": words.weight.detach(), "contexts": contexts.weight.detach()}, "words.pt")
