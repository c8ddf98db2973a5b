"""Decoders by configuration, from GPT-2 small to Llama 2 70B: what `lab.closed_form` counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from kit.laws.precisions import default_dtype
from lab.closed_form import Setting, Shape
from lab.measure import solution

# As published; 7B and 70B are those of Llama 2.
SHAPES = {
    "GPT-2 small": Shape(12, 768, 3072, heads=12, kv_heads=12, words=50_257, longest=1024),
    "7B": Shape(32, 4096, 11_008, heads=32, kv_heads=32, words=32_000),
    "70B": Shape(80, 8192, 28_672, heads=64, kv_heads=8, words=32_000),
}


class Block(nn.Module):
    """Attention and a feed-forward part over x (batch, length, width).

    Rotary positions are left out: they hold nothing between the passes.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner, biased = shape.width, shape.inner, not shape.gated
        self.head, self.heads, self.kv_heads = shape.head, shape.heads, shape.kv_heads
        self.norm1 = nn.LayerNorm(width, bias=biased)
        self.qkv = nn.Linear(width, shape.projected, bias=biased)
        self.out = nn.Linear(width, width, bias=biased)
        self.norm2 = nn.LayerNorm(width, bias=biased)
        self.up = nn.Linear(width, inner, bias=biased)
        self.gate = nn.Linear(width, inner, bias=False) if shape.gated else None
        self.down = nn.Linear(inner, width, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, length, width) to the same shape."""
        x = x + self.out(self._attend(self.norm1(x)))
        normed = self.norm2(x)
        if self.gate is None:
            out: Tensor = x + self.down(F.gelu(self.up(normed)))
        else:
            out = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out

    def _attend(self, normed: Tensor) -> Tensor:
        # (batch, heads, length, head)
        heads = self.qkv(normed).unflatten(-1, (-1, self.head)).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        grouped: dict[str, Any] = {"enable_gqa": True} if self.kv_heads != self.heads else {}
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, **grouped)
        return mixed.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Tokens (batch, length) to logits (batch, length, words)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.words, shape.width)
        self.places = nn.Embedding(shape.longest, shape.width) if shape.longest else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=not shape.gated)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        if not shape.gated:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, words)."""
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make(
    shape: Shape, setting: Setting, tokens: tuple[int, int]
) -> tuple[nn.Module, Optimizer, Tensor]:
    """Model, Adam and tokens (batch, length), on the default device."""
    # Made in it: a conversion cannot swap fake parameters.
    with default_dtype(torch.bfloat16 if setting.pure else torch.float32):
        model = Decoder(shape)
    if setting.checkpoint:
        solution("checkpointed_model").checkpoint_blocks(model, Block)
    adam = Adam(model.parameters(), foreach=True)  # as is the default on cuda
    return model, adam, torch.zeros(tokens, dtype=torch.int64)
