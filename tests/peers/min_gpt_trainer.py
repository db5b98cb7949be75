# In the manner of minGPT: a Trainer class with callbacks, an endless loop over a loader that draws with replacement.
from collections import defaultdict

import torch
import torch.nn as nn
from peer_data import Numbered, device, save
from torch.nn import functional as F
from torch.utils.data.dataloader import DataLoader


class Trainer:
    def __init__(self, model, train_dataset, max_iters, batch_size, learning_rate):
        self.optimizer, self.callbacks = None, defaultdict(list)
        self.model, self.train_dataset = model, train_dataset
        self.max_iters, self.batch_size, self.learning_rate = max_iters, batch_size, learning_rate
        self.iter_num = 0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model = self.model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))
        train_loader = DataLoader(
            self.train_dataset,
            sampler=torch.utils.data.RandomSampler(self.train_dataset, replacement=True, num_samples=40),
            shuffle=False,
            batch_size=self.batch_size,
            num_workers=0,
        )
        model.train()
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = [t.to(device) for t in batch]
            logits, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if self.iter_num >= self.max_iters:
                break


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(12, 16), nn.Parameter(torch.zeros(1, 6, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 12, bias=False)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos
        mask = nn.Transformer.generate_square_subsequent_mask(6, device=x.device)
        logits = self.head(self.layer(x, src_mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.view(-1, 12), targets.view(-1), ignore_index=-1)


torch.manual_seed(3407)
rows = torch.randint(0, 12, (30, 7), generator=torch.Generator().manual_seed(2))
model = Tiny().to(device)
ends = []
trainer = Trainer(model, Numbered([(row[:-1], row[1:]) for row in rows], True), 12, 9, 5e-4)
trainer.add_callback("on_batch_end", lambda t: ends.append(t.iter_num))
trainer.run()
save(model, len(ends), [])
