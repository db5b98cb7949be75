# In the manner of makemore: names padded with -1, an endless loader, evaluation by some batches in the middle.
import torch
import torch.nn as nn
from peer_data import Numbered, save
from torch.nn import functional as F
from torch.utils.data.dataloader import DataLoader

torch.manual_seed(3407)
g = torch.Generator().manual_seed(6)


def name():
    length = int(torch.randint(2, 8, (), generator=g))
    word = torch.randint(1, 10, (length,), generator=g)
    x, y = torch.zeros(9, dtype=torch.long), torch.full((9,), -1, dtype=torch.long)
    x[1 : 1 + length], y[:length], y[length] = word, word, 0
    return x, y


class InfiniteDataLoader:
    def __init__(self, dataset, **kwargs):
        train_sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=int(1e10))
        self.train_loader = DataLoader(dataset, sampler=train_sampler, **kwargs)
        self.data_iter = iter(self.train_loader)

    def next(self):
        try:
            batch = next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.train_loader)
            batch = next(self.data_iter)
        return batch


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, 12))
        self.wte, self.xh_to_h, self.lm_head = nn.Embedding(10, 8), nn.Linear(20, 12), nn.Linear(12, 10)

    def forward(self, idx, targets=None):
        emb, hprev, hiddens = self.wte(idx), self.start.expand((idx.size(0), -1)), []
        for i in range(idx.size(1)):
            hprev = torch.tanh(self.xh_to_h(torch.cat([emb[:, i, :], hprev], dim=1)))
            hiddens.append(hprev)
        logits = self.lm_head(torch.stack(hiddens, 1))
        return logits, F.cross_entropy(logits.view(-1, 10), targets.view(-1), ignore_index=-1)


words = [name() for _ in range(50)]
train_dataset, test_dataset = Numbered(words[:40], True), Numbered(words[40:], False)
model = RNN()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-6)


@torch.inference_mode()
def evaluate(model, dataset, batch_size=5, max_batches=None):
    model.eval()
    loader = DataLoader(dataset, shuffle=True, batch_size=batch_size, num_workers=0)
    found = []
    for i, batch in enumerate(loader):
        _, loss = model(*batch)
        found.append(loss.item())
        if max_batches is not None and i >= max_batches:
            break
    model.train()
    return torch.tensor(found).mean().item()


batch_loader = InfiniteDataLoader(train_dataset, batch_size=8, num_workers=0)
losses = []
for step in range(12):
    X, Y = batch_loader.next()
    logits, loss = model(X, Y)
    model.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        losses.append(evaluate(model, test_dataset, max_batches=10))
save(model, step + 1, losses)
