# A text cut into columns by hand, as word-level language models do: no DataLoader.
import torch
from torch import nn

torch.manual_seed(7)
text = torch.randint(0, 20, (401,))
columns = text[:400].view(8, 50).t().contiguous()
embed, cell, head = nn.Embedding(20, 12), nn.RNN(12, 12), nn.Linear(12, 20)
model = nn.ModuleList([embed, cell, nn.Dropout(0.2), head])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(2):
    for start in range(0, 45, 5):
        data, target = columns[start : start + 5], columns[start + 1 : start + 6]
        out = head(model[2](cell(embed(data))[0]))
        loss = nn.functional.cross_entropy(out.view(-1, 20), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
torch.save(model.state_dict(), "text.pt")
