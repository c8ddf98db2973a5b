"""GPT-2, ViT and LLaMA as most people have them: of the transformers library, by configuration."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

from kit.laws.precisions import default_dtype
from kit.private_torch import active_fake_mode
from lab.measure import Made, solution
from lab.models import WAYS, gpt2, next_token, train_step, with_logits

# A model that returns logits, and the class of its blocks.
Built = tuple[nn.Module, type[nn.Module]]


def gpt(layers: int, width: int, *, words: int = 50257, length: int = 1024) -> Built:
    """GPT-2 without dropout: tokens (batch, length) to logits (batch, length, words)."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    sizes = {"n_layer": layers, "n_embd": width, "n_head": max(1, width // 64)}
    sizes |= {"vocab_size": words, "n_positions": length}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return gpt2(**sizes, **ends, **dropout).train(), GPT2Block


def vit(layers: int, width: int, heads: int, *, image: int, patch: int) -> Built:
    """ViT: pictures (batch, 3, image, image) to logits (batch, 1000)."""
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


def llama(layers: int) -> Built:
    """LLaMA 7B, 4096 wide: for dry runs, made in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    with default_dtype(torch.bfloat16):
        config = LlamaConfig(num_hidden_layers=layers, use_cache=False)
        return with_logits(LlamaForCausalLM(config)), LlamaDecoderLayer


class Trained:
    """A model in one of WAYS, and its step with a batch of any size.

    The article's ViT (16 layers, 2560 wide) and GPT-2 small, or what a laptop can train.
    """

    def __init__(self, name: str, way: str, device: torch.device, *, full: bool, small: bool):
        self.vision, self.device = name == "ViT", device
        self.dtype, checkpoint = WAYS[way]
        self.side = 224 if full else 32  # of a picture
        self.words, self.length = (50257, 1024) if full else (256, 16)
        with device:
            if self.vision:
                sizes = (4 if small else 16, 2560, 16) if full else (6, 64, 4)
                self.model, block = vit(*sizes, image=self.side, patch=14 if full else 8)
            else:
                layers, width = (3 if small else 12, 768) if full else (6, 64)
                self.model, block = gpt(layers, width, words=self.words, length=self.length)
        self.model.train()
        if checkpoint:
            solution("checkpointed_model").checkpoint_blocks(self.model, block)
        self.optimizer = Adam(self.model.parameters(), foreach=True)

    def made(self, size: int) -> Made:
        """One training step with `size` samples."""
        batch = self._batch(size)
        loss = F.cross_entropy if self.vision else next_token
        step = partial(train_step, self.model, batch, loss, self.optimizer, dtype=self.dtype)
        return step, self.model, self.optimizer, batch

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        with self.device:
            if self.vision:
                pictures = torch.rand(size, 3, self.side, self.side)
                return pictures, torch.zeros(size, dtype=torch.long)
            tokens = torch.randint(self.words, (size, self.length + 1))
        return tokens[:, :-1], tokens[:, 1:]
