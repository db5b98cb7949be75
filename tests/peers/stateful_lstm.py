# Hidden states that go on from batch to batch, each row with the next piece of its text; a batch is cut in columns.
import torch
import torch.nn as nn
from peer_data import save, seen
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(16)
ROWS, PIECES, LENGTH = 8, 5, 7
text = torch.randint(0, 15, (ROWS, PIECES * LENGTH + 1), generator=torch.Generator().manual_seed(3))


class Pieces(Dataset):
    """Piece k of row r is sample k * ROWS + r, so a sequential loader goes on where it was."""

    def __len__(self):
        return ROWS * PIECES

    def __getitem__(self, i):
        seen.append(i)
        piece, row = divmod(i, ROWS)
        part = text[row, piece * LENGTH : (piece + 1) * LENGTH + 1]
        return part[:-1], part[1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(15, 10), nn.LSTM(10, 12, batch_first=True), nn.Linear(12, 15)

    def forward(self, x, state):
        h, state = self.rnn(self.embed(x), state)
        return self.out(h), state


train_loader = DataLoader(Pieces(), batch_size=ROWS, shuffle=False)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
steps, losses = 0, []
for epoch in range(4):
    state = None
    for x, y in train_loader:
        logits, state = model(x, state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.cross_entropy(logits.reshape(-1, 15), y.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        steps += 1
save(model, steps, losses)
