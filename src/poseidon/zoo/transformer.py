"""A language model with GPT-2 small's architecture; its token embedding is also its output projection."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poseidon.zoo.network import Sizes, Task

_LAYERS, _HEADS, _HEAD_SIZE, _VOCABULARY, _CONTEXT = 12, 12, 64, 50257, 1024


class Attention(nn.Module):
    """Causal self-attention over ``heads`` heads."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return a mixture of each position's past, of the shape of ``x``: batch, position, hidden."""
        batch, length, hidden = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return projected


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with normalised input and a residual connection."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU("tanh"), nn.Linear(4 * hidden, hidden))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the shape of ``x``."""
        mixed: Tensor = x + self.dropout(self.attention(self.norm1(x)))
        outputs: Tensor = mixed + self.dropout(self.mlp(self.norm2(mixed)))
        return outputs


class TransformerNet(nn.Module):
    """Decoder-only transformer from token numbers to logits over the vocabulary."""

    def __init__(
        self,
        vocabulary: int,
        context: int,
        head_size: int,
        dropout: float,
        *,
        layers: int = _LAYERS,
        heads: int = _HEADS,
    ) -> None:
        super().__init__()
        hidden = heads * head_size
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(context, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(hidden, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        _initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, position, vocabulary) for the token after each position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


@dataclass(frozen=True)
class NextToken:
    """Uniformly drawn tokens; the loss is the cross entropy of predicting each from those before it."""

    vocabulary: int
    context: int

    def sample(self, size: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return ``((tokens,), tokens one position later)``."""
        generator = torch.Generator("cpu").manual_seed(seed)
        text = torch.randint(self.vocabulary, (size, self.context + 1), generator=generator, device="cpu")
        return (text[:, :-1],), text[:, 1:]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy, averaged over samples and positions."""
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def gpt2(sizes: Sizes) -> tuple[nn.Module, Task]:
    """Return GPT-2 small; the width scales the size of a head, the vocabulary and the context."""
    vocabulary, context = sizes.scaled(_VOCABULARY), sizes.scaled(_CONTEXT)
    model = TransformerNet(vocabulary, context, sizes.scaled(_HEAD_SIZE), sizes.dropout)
    return model, NextToken(vocabulary, context)


def _initialise(model: TransformerNet) -> None:
    """Draw GPT-2's initial weights; layers that add to the residual stream start smaller, since depth sums them."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for block in model.blocks.children():
        assert isinstance(block, Block)
        for weight in (block.attention.proj.weight, block.mlp.get_parameter("2.weight")):
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * len(model.blocks)))
