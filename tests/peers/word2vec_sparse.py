# In the manner of several word2vec repositories: skip-grams, negative samples, sparse embeddings, SparseAdam.
import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import Numbered, save
from torch.utils.data import DataLoader

torch.manual_seed(1)
g = torch.Generator().manual_seed(11)
emb_size, emb_dimension = 60, 8


class SkipGramModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.u_embeddings = nn.Embedding(emb_size, emb_dimension, sparse=True)
        self.v_embeddings = nn.Embedding(emb_size, emb_dimension, sparse=True)
        initrange = 1.0 / emb_dimension
        nn.init.uniform_(self.u_embeddings.weight.data, -initrange, initrange)
        nn.init.constant_(self.v_embeddings.weight.data, 0)

    def forward(self, pos_u, pos_v, neg_v):
        emb_u, emb_v, emb_neg_v = self.u_embeddings(pos_u), self.v_embeddings(pos_v), self.v_embeddings(neg_v)
        score = -F.logsigmoid(torch.clamp(torch.sum(emb_u * emb_v, dim=1), max=10, min=-10))
        neg = torch.clamp(torch.bmm(emb_neg_v, emb_u.unsqueeze(2)).squeeze(2), max=10, min=-10)
        return torch.mean(score - torch.sum(F.logsigmoid(-neg), dim=1))


rows = [
    (*torch.randint(0, emb_size, (2,), generator=g), torch.randint(0, emb_size, (5,), generator=g)) for _ in range(100)
]
skip_gram_model = SkipGramModel()
steps = 0
for iteration in range(2):
    optimizer = torch.optim.SparseAdam(list(skip_gram_model.parameters()), lr=0.01, eps=1e-4)
    dataloader = DataLoader(Numbered(rows, True), batch_size=16, shuffle=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(dataloader))
    running_loss = 0.0
    for i, sample_batched in enumerate(dataloader):
        if len(sample_batched[0]) > 1:
            pos_u, pos_v, neg_v = sample_batched
            optimizer.zero_grad()
            loss = skip_gram_model.forward(pos_u, pos_v, neg_v)
            loss.backward()
            optimizer.step()
            scheduler.step()
            running_loss = running_loss * 0.9 + loss.item() * 0.1
            steps += 1
save(skip_gram_model, steps, [])
