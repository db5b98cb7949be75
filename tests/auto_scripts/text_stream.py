# Sentiment of tiny reviews, read from a stream.
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

GOOD = "great lovely wonderful fine superb charming".split()
BAD = "awful dull terrible boring weak dreadful".split()
FILLER = "the a film plot actor scene was is very quite and with of".split()

random.seed(3)
torch.manual_seed(3)
reviews = []
for _ in range(405):
    label = random.randint(0, 1)
    words = random.choices(FILLER, k=random.randint(3, 8)) + random.choices(GOOD if label else BAD, k=2)
    random.shuffle(words)
    reviews.append((words, label))

vocabulary = {word: i + 1 for i, word in enumerate(set(GOOD + BAD + FILLER))}


class Reviews(IterableDataset):
    def __iter__(self):
        order = list(range(len(reviews)))
        random.shuffle(order)
        for i in order:
            words, label = reviews[i]
            yield [vocabulary[word] for word in words], label


def collate(batch):
    length = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch])
    return ids, torch.tensor([float(label) for _, label in batch])


class Classifier(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size, 32, padding_idx=0)
        self.output = nn.Linear(32, 1)

    def forward(self, ids):
        mask = (ids != 0).float().unsqueeze(-1)
        mean = (self.embedding(ids) * mask).sum(1) / mask.sum(1)
        return self.output(mean).squeeze(-1)


model = Classifier(2000)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(3):
    total, batches = 0.0, 0
    for ids, labels in DataLoader(Reviews(), batch_size=20, collate_fn=collate):
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total, batches = total + loss.item(), batches + 1
    print(f"epoch {epoch}: loss {total / batches:.4f} in {batches} batches")
torch.save({"model": model.state_dict(), "batches": batches, "words": sorted(vocabulary.items())}, "text.pt")
