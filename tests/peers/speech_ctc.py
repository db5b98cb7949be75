# In the manner of speech recognition: spectrograms of different length, targets joined to one row, CTC.
import torch
import torch.nn as nn
from peer_data import Numbered, save
from torch.utils.data import DataLoader

torch.manual_seed(13)


def utterances(count, seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = 2 + i % 4
        text = torch.randint(1, 9, (length,), generator=g)
        rows.append((torch.randn(3 * length + i % 5, 6, generator=g), text))
    return rows


def data_processing(data):
    spectrograms = nn.utils.rnn.pad_sequence([s for s, _ in data], batch_first=True)
    input_lengths = [len(s) for s, _ in data]
    label_lengths = [len(t) for _, t in data]
    return spectrograms, torch.cat([t for _, t in data]), input_lengths, label_lengths


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU())
        self.rnn = nn.GRU(16, 12, batch_first=True)
        self.classifier = nn.Linear(12, 9)

    def forward(self, x):
        return self.classifier(self.rnn(self.inner(x))[0]).log_softmax(2)


model = Recognizer()
train_loader = DataLoader(Numbered(utterances(42, 1), True), batch_size=8, shuffle=True, collate_fn=data_processing)
test_loader = DataLoader(Numbered(utterances(12, 2), False), batch_size=6, collate_fn=data_processing)
criterion = nn.CTCLoss(blank=0, zero_infinity=True)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-5)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=5e-3, steps_per_epoch=len(train_loader), epochs=3, anneal_strategy="linear"
)
steps, losses = 0, []
for epoch in range(3):
    model.train()
    for spectrograms, labels, input_lengths, label_lengths in train_loader:
        optimizer.zero_grad()
        output = model(spectrograms).transpose(0, 1)
        loss = criterion(output, labels, input_lengths, label_lengths)
        loss.backward()
        optimizer.step()
        scheduler.step()
        steps += 1
    model.eval()
    with torch.no_grad():
        losses.append(sum(criterion(model(s).transpose(0, 1), t, n, m).item() for s, t, n, m in test_loader))
save(model, steps, losses)
