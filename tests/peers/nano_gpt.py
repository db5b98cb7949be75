# In the manner of nanoGPT: a mapped text, random windows, accumulation, tied weights, a rate by hand, AdamW groups.
import math
import os
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
from peer_data import save
from torch.nn import functional as F

batch_size, block_size, accumulation, n_embd, vocab, max_iters, grad_clip = 4, 8, 2, 16, 20, 6, 1.0
torch.manual_seed(1337)
np.random.RandomState(3).randint(0, vocab, 500).astype(np.uint16).tofile("train.bin")


def get_batch():
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 32), nn.GELU(), nn.Linear(32, n_embd))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, 2, C // 2).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(vocab, n_embd), "wpe": nn.Embedding(block_size, n_embd), "h": nn.ModuleList([Block()])}
        )
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


model = GPT()
optimizer = model.configure_optimizers()
scaler = torch.amp.GradScaler("cpu", enabled=False)
ctx = nullcontext()
X, Y = get_batch()
losses = []
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * it / max_iters))
    for _ in range(accumulation):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / accumulation
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
os.remove("train.bin")
save(model, max_iters, losses)
