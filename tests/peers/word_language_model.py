# In the manner of torch's word_language_model: no loader, columns of one long text, a hidden state that is carried on.
import torch
import torch.nn as nn
from peer_data import save

torch.manual_seed(1111)
bptt, clip, lr = 7, 0.25, 2.0
text = torch.randint(0, 30, (600,), generator=torch.Generator().manual_seed(5))


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nhid = nhid

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(output).view(-1, 30), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, self.nhid), weight.new_zeros(1, bsz, self.nhid)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


train_data, val_data = batchify(text[:450], 6), batchify(text[450:], 3)
model = RNNModel(30, 12, 12)
criterion = nn.CrossEntropyLoss()


def evaluate(source):
    model.eval()
    total, hidden = 0.0, model.init_hidden(3)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


losses, steps, best = [], 0, None
for _ in range(2):
    model.train()
    hidden = model.init_hidden(6)
    for i in range(0, train_data.size(0) - 1, bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        criterion(output, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        steps += 1
    losses.append(evaluate(val_data))
    if best is None or losses[-1] < best:
        with open("model.pt", "wb") as f:
            torch.save(model, f)
        best = losses[-1]
    else:
        lr /= 4.0
with open("model.pt", "rb") as f:
    model = torch.load(f, weights_only=False)
    model.rnn.flatten_parameters()
save(model, steps, losses)
