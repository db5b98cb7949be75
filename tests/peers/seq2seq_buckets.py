# In the manner of translation tutorials: buckets by length, packed sequences, attention, teacher forcing now and then,
# decided for each batch or each token: seq2seq_buckets.py {batch,token}
import random
import sys

import torch
import torch.nn as nn
from peer_data import Numbered, save
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Sampler

PAD, SOS, EOS = 0, 1, 2
random.seed(4)
torch.manual_seed(4)


def pairs(count, seed):
    rng = random.Random(seed)
    rows = [[rng.randrange(3, 20) for _ in range(rng.randrange(2, 9))] for _ in range(count)]
    return [(torch.tensor(row + [EOS]), torch.tensor([SOS, *reversed(row), EOS])) for row in rows]


class BucketSampler(Sampler):
    def __init__(self, lengths, batch_size, buckets=3):
        self.lengths, self.batch_size, self.buckets = lengths, batch_size, buckets

    def __iter__(self):
        order = torch.randperm(len(self.lengths)).tolist()
        pool = self.batch_size * self.buckets
        batches = []
        for start in range(0, len(order), pool):
            chunk = sorted(order[start : start + pool], key=lambda i: self.lengths[i])
            batches += [chunk[i : i + self.batch_size] for i in range(0, len(chunk), self.batch_size)]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self):
        return -(-len(self.lengths) // self.batch_size)


def collate(rows):
    rows = sorted(rows, key=lambda row: -len(row[0]))
    source = pad_sequence([s for s, _ in rows], padding_value=PAD)
    target = pad_sequence([t for _, t in rows], padding_value=PAD)
    return source, torch.tensor([len(s) for s, _ in rows]), target


class Encoder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embed = nn.Embedding(20, hidden, padding_idx=PAD)
        self.rnn = nn.GRU(hidden, hidden, bidirectional=True)

    def forward(self, source, lengths):
        packed = pack_padded_sequence(self.embed(source), lengths)
        outputs, hidden = self.rnn(packed)
        outputs, _ = pad_packed_sequence(outputs)
        half = outputs.size(2) // 2
        return outputs[:, :, :half] + outputs[:, :, half:], hidden[:1]


class Decoder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embed = nn.Embedding(20, hidden, padding_idx=PAD)
        self.rnn = nn.GRU(hidden * 2, hidden)
        self.out = nn.Linear(hidden * 2, 20)

    def forward(self, token, hidden, encoded, mask):
        scores = torch.einsum("lbh,bh->bl", encoded, hidden[0]).masked_fill(~mask, -1e9)
        context = torch.einsum("bl,lbh->bh", scores.softmax(1), encoded)
        output, hidden = self.rnn(torch.cat([self.embed(token), context], 1)[None], hidden)
        return self.out(torch.cat([output[0], context], 1)), hidden


class Seq2Seq(nn.Module):
    def __init__(self, hidden=14):
        super().__init__()
        self.encoder, self.decoder = Encoder(hidden), Decoder(hidden)

    def forward(self, source, lengths, target, teacher_forcing):
        encoded, hidden = self.encoder(source, lengths)
        mask = (torch.arange(len(source)) < lengths[:, None]).bool()
        token, logits = target[0], []
        is_forced = random.random() < teacher_forcing
        for t in range(1, len(target)):
            step, hidden = self.decoder(token, hidden, encoded, mask)
            logits.append(step)
            if sys.argv[1] == "token":
                is_forced = random.random() < teacher_forcing
            token = target[t] if is_forced else step.argmax(1)
        return torch.stack(logits)


train, valid = pairs(50, 1), pairs(14, 2)
loader = DataLoader(
    Numbered(train, True), batch_sampler=BucketSampler([len(s) for s, _ in train], 8), collate_fn=collate
)
valid_loader = DataLoader(Numbered(valid, False), batch_size=7, collate_fn=collate)
model = Seq2Seq()
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
steps, losses = 0, []
for epoch in range(3):
    model.train()
    for source, lengths, target in loader:
        optimizer.zero_grad()
        logits = model(source, lengths, target, teacher_forcing=0.7)
        loss = criterion(logits.view(-1, 20), target[1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
    model.eval()
    with torch.no_grad():
        parts = [criterion(model(s, n, t, 0.0).view(-1, 20), t[1:].reshape(-1)).item() for s, n, t in valid_loader]
    losses.append(sum(parts) / len(parts))
save(model, steps, losses)
