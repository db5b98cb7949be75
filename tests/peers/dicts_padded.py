# In the manner of token classification without a trainer: dicts, dynamic padding by a collator, labels of -100.
import torch
import torch.nn as nn
from peer_data import Numbered, save
from torch.utils.data import DataLoader

torch.manual_seed(0)


class Collator:
    def __call__(self, features):
        longest = max(len(f["input_ids"]) for f in features)
        batch = {"input_ids": [], "attention_mask": [], "labels": []}
        for f in features:
            missing = longest - len(f["input_ids"])
            batch["input_ids"].append(f["input_ids"] + [0] * missing)
            batch["attention_mask"].append([1] * len(f["input_ids"]) + [0] * missing)
            batch["labels"].append(f["labels"] + [-100] * missing)
        return {k: torch.tensor(v) for k, v in batch.items()}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(40, 12, padding_idx=0)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.classifier = nn.Linear(12, 5)

    def forward(self, input_ids, attention_mask, labels=None):
        x = self.embeddings(input_ids)
        x = x + self.attention(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)[0]
        logits = self.classifier(x)
        loss = None if labels is None else nn.CrossEntropyLoss()(logits.view(-1, 5), labels.view(-1))
        return {"loss": loss, "logits": logits}


def rows(count, seed):
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(1, 40, (int(torch.randint(2, 12, (), generator=g)),), generator=g).tolist()
        yield {"input_ids": ids, "labels": [i % 5 for i in ids]}


train_dataloader = DataLoader(Numbered(list(rows(44, 1)), True), shuffle=True, collate_fn=Collator(), batch_size=8)
eval_dataloader = DataLoader(Numbered(list(rows(16, 2)), False), collate_fn=Collator(), batch_size=8)
model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
steps, losses = 0, []
for epoch in range(3):
    model.train()
    for step, batch in enumerate(train_dataloader):
        outputs = model(**batch)
        loss = outputs["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    model.eval()
    total = 0.0
    for batch in eval_dataloader:
        with torch.no_grad():
            total += model(**batch)["loss"].item()
    losses.append(total)
save(model, steps, losses)
