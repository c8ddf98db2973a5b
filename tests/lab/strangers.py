"""GPT-2 and ViT as most people have them: of the transformers library, from configurations.

Where the library is not installed, models of our own with the same shape stand in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

from kit.laws.precisions import default_dtype
from kit.laws.toys import Block
from kit.private_torch import active_fake_mode
from lab.measure import solution
from lab.models import WAYS, Gpt, gpt2, has_transformers, next_token, train_step, with_logits

# A model that returns logits, and the class of its blocks.
Built = tuple[nn.Module, type[nn.Module]]


def gpt(layers: int, width: int, *, words: int = 50257, length: int = 1024) -> Built:
    """GPT-2 without dropout: tokens (batch, length) to logits (batch, length, words)."""
    if not has_transformers():
        return Gpt(layers, width, words, length), Block
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    sizes = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64)}
    sizes |= {"vocab_size": words, "n_positions": length}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return gpt2(**sizes, **ends, **dropout).train(), GPT2Block


def vit(layers: int, width: int, heads: int, *, image: int, patch: int) -> Built:
    """ViT: pictures (batch, 3, image, image) to logits (batch, 1000)."""
    if not has_transformers():
        return Pictures(layers, width, heads, image, patch), Block
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.models.vit import modeling_vit

    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    sizes |= {"num_attention_heads": heads, "image_size": image, "patch_size": patch}
    options: dict[str, Any] = {**sizes, "num_labels": 1000}
    config = ViTConfig(**options)
    if active_fake_mode() is None:
        return with_logits(ViTForImageClassification(config)), modeling_vit.ViTLayer
    # A truncated normal distribution is drawn until it fits: a dry run has no values to look at.
    with mock.patch.object(modeling_vit.ViTPreTrainedModel, "_init_weights"):
        return with_logits(ViTForImageClassification(config)), modeling_vit.ViTLayer


def build(name: str, *, full: bool, small: bool) -> Built:
    """The article's ViT (16 layers, 2560 wide) and GPT-2 small, or what a laptop can train."""
    if name == "ViT" and full:
        return vit(4 if small else 16, 2560, 16, image=224, patch=14)
    if name == "ViT":
        return vit(6, 64, 4, image=32, patch=8)
    if full:
        return gpt(3 if small else 12, 768)
    return gpt(6, 64, words=256, length=16)


class Trained:
    """A model in one of WAYS, and its step with a batch of any size."""

    def __init__(self, name: str, way: str, device: torch.device, *, full: bool, small: bool):
        self.name, self.full = name, full
        self.device, (self.dtype, checkpoint) = device, WAYS[way]
        with device:
            self.model, block = build(name, full=full, small=small)
        self.model.train()
        if checkpoint:
            solution("checkpointed_model").checkpoint_blocks(self.model, block)
        self.optimizer = Adam(self.model.parameters(), foreach=True)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def step(self, size: int) -> tuple[Callable[[], object], list[Tensor]]:
        """One training step with `size` samples, and the batch."""
        vision = self.name == "ViT"
        batch = _pictures(self, size) if vision else _tokens(self, size)
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy if vision else next_token
        step = partial(train_step, self.model, batch, loss, self.optimizer, dtype=self.dtype)
        return step, list(batch)


def _pictures(trained: Trained, size: int) -> tuple[Tensor, Tensor]:
    side = 224 if trained.full else 32
    with trained.device:
        return torch.rand(size, 3, side, side), torch.zeros(size, dtype=torch.long)


def _tokens(trained: Trained, size: int) -> tuple[Tensor, Tensor]:
    words, length = (50257, 1024) if trained.full else (256, 16)
    with trained.device:
        tokens = torch.randint(words, (size, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


class Pictures(nn.Module):
    """A small ViT: pictures (batch, 3, image, image) to logits (batch, 1000)."""

    def __init__(self, layers: int, width: int, heads: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits (batch, 1000)."""
        patches = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(patches), -1, -1), patches], 1) + self.places
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, -1])  # its attention looks back only
        return logits


def llama_name() -> str:
    """What `llama` is."""
    return "LLaMA 7B" if has_transformers() else "A GPT of our own with 7 billion numbers"


def llama(layers: int = 32) -> Built:
    """LLaMA 7B by its configuration, 4096 wide: for dry runs, made in bfloat16."""
    with default_dtype(torch.bfloat16):
        if not has_transformers():
            return Gpt(layers, 4608, 32000), Block
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        return with_logits(
            LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False))
        ), LlamaDecoderLayer
