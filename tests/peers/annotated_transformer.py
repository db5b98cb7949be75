# In the manner of the annotated Transformer: label smoothing as a sum over the tokens' number, LambdaLR with warmup.
import torch
import torch.nn as nn
from peer_data import Numbered, save
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

torch.manual_seed(0)
V, pad = 11, 0


class Batch:
    def __init__(self, src, tgt):
        self.src, self.src_mask = src, src == pad
        self.tgt, self.tgt_y = tgt[:, :-1], tgt[:, 1:]
        self.ntokens = (self.tgt_y != pad).data.sum()


class LabelSmoothing(nn.Module):
    def __init__(self, size, padding_idx, smoothing):
        super().__init__()
        self.criterion = nn.KLDivLoss(reduction="sum")
        self.padding_idx, self.confidence, self.smoothing, self.size = padding_idx, 1.0 - smoothing, smoothing, size

    def forward(self, x, target):
        true_dist = x.data.clone()
        true_dist.fill_(self.smoothing / (self.size - 2))
        true_dist.scatter_(1, target.data.unsqueeze(1), self.confidence)
        true_dist[:, self.padding_idx] = 0
        mask = torch.nonzero(target.data == self.padding_idx)
        if mask.dim() > 0:
            true_dist.index_fill_(0, mask.squeeze(), 0.0)
        return self.criterion(x, true_dist.clone().detach())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, 16), nn.Parameter(0.1 * torch.randn(1, 10, 16))
        self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(16, V)

    def forward(self, src, tgt, src_mask):
        look = nn.Transformer.generate_square_subsequent_mask(tgt.size(1))
        src, tgt = (self.embed(x) + self.place[:, : x.size(1)] for x in (src, tgt))
        out = self.body(src, tgt, tgt_mask=look, src_key_padding_mask=src_mask, memory_key_padding_mask=src_mask)
        return torch.log_softmax(self.generator(out), -1)


def sentences(count, seed):
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, V, (count, 10), generator=g)
    for row in rows:
        row[int(torch.randint(4, 11, (), generator=g)) :] = pad
    return list(rows)


def collate(rows):
    return Batch(torch.stack(rows), torch.stack(rows))


def rate(step, warmup):
    step = max(step, 1)
    return 16 ** (-0.5) * min(step ** (-0.5), step * warmup ** (-1.5))


model = Model()
for p in model.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
criterion = LabelSmoothing(V, pad, 0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.9, 0.98), eps=1e-5)
lr_scheduler = LambdaLR(optimizer, lr_lambda=lambda step: rate(step, warmup=10))
train_dataloader = DataLoader(Numbered(sentences(42, 1), True), batch_size=12, shuffle=True, collate_fn=collate)
valid_dataloader = DataLoader(Numbered(sentences(12, 2), False), batch_size=12, collate_fn=collate)


def run_epoch(data_iter, mode):
    total_tokens, total_loss, steps = 0, 0, 0
    for batch in data_iter:
        out = model(batch.src, batch.tgt, batch.src_mask)
        sloss = criterion(out.reshape(-1, V), batch.tgt_y.reshape(-1)) / batch.ntokens
        if mode == "train":
            sloss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            lr_scheduler.step()
            steps += 1
        total_loss += sloss.data * batch.ntokens
        total_tokens += batch.ntokens
    return float(total_loss / total_tokens), steps


losses, steps = [], 0
for epoch in range(2):
    model.train()
    steps += run_epoch(train_dataloader, "train")[1]
    model.eval()
    with torch.no_grad():
        losses.append(run_epoch(valid_dataloader, "eval")[0])
save(model, steps, losses)
