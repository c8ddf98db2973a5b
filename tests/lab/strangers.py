"""GPT-2 and ViT as most people have them: of the transformers library, from configurations.

Where the library is not installed, models of our own with the same shape stand in.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

from kit.laws.toys import Block
from kit.private_torch import active_fake_mode
from lab.measure import solution
from lab.models import Gpt, next_token, plain_step

# A model that returns logits, and the class of its blocks.
Built = tuple[nn.Module, type[nn.Module]]
WAYS: dict[str, tuple[torch.dtype, bool]] = {
    "fp32": (torch.float32, False),
    "AMP": (torch.bfloat16, False),
    "checkpointed": (torch.float32, True),
    "both": (torch.bfloat16, True),
}


def installed() -> bool:
    """Whether the models are those of the transformers library."""
    return importlib.util.find_spec("transformers") is not None


def gpt(layers: int, width: int, *, words: int = 50257, length: int = 1024) -> Built:
    """GPT-2 without dropout: tokens (batch, length) to logits (batch, length, words)."""
    if not installed():
        return Gpt(layers, width, words, length), Block
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    sizes = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64)}
    sizes |= {"vocab_size": words, "n_positions": length}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    options: dict[str, Any] = {**sizes, **ends, **dropout, "use_cache": False}
    return _with_logits(GPT2LMHeadModel(GPT2Config(**options))), GPT2Block


def vit(layers: int, width: int, heads: int, *, image: int, patch: int) -> Built:
    """ViT: pictures (batch, 3, image, image) to logits (batch, 1000)."""
    if not installed():
        return Pictures(layers, width, heads, image, patch), Block
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.models.vit import modeling_vit

    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width}
    sizes |= {"num_attention_heads": heads, "image_size": image, "patch_size": patch}
    options: dict[str, Any] = {**sizes, "num_labels": 1000}
    config = ViTConfig(**options)
    if active_fake_mode() is None:
        return _with_logits(ViTForImageClassification(config)), modeling_vit.ViTLayer
    # A truncated normal distribution is drawn until it fits: a dry run has no values to look at.
    with mock.patch.object(modeling_vit.ViTPreTrainedModel, "_init_weights"):
        return _with_logits(ViTForImageClassification(config)), modeling_vit.ViTLayer


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

    def step(self, size: int, *, dry: bool = False) -> tuple[Callable[[], object], list[Tensor]]:
        """One training step with `size` samples, and the batch."""
        vision = self.name == "ViT"
        batch = _pictures(self, size) if vision else _tokens(self, size)
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy if vision else next_token
        # A dry run has no values, and the reference looks at those of the gradients.
        train_step = plain_step if dry else solution("amp_loop").train_step

        def step() -> object:
            return train_step(self.model, batch, loss, self.optimizer, dtype=self.dtype)

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


def _with_logits(model: nn.Module) -> nn.Module:
    """The model, which returns a tensor instead of the library's record."""
    model.register_forward_hook(lambda module, args, output: output.logits)
    return model.train()


def llama_name() -> str:
    """What `llama` is."""
    return "LLaMA 7B" if installed() else "A GPT of our own with 7 billion numbers"


def llama(layers: int = 32) -> Built:
    """LLaMA 7B by its configuration, 4096 wide: for dry runs, made in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        if not installed():
            return Gpt(layers, 4608, 32000), Block
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        return _with_logits(
            LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False))
        ), LlamaDecoderLayer
    finally:
        torch.set_default_dtype(torch.float32)
