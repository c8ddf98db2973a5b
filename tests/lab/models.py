"""The models that the experiments train, and their data."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from kit.laws.toys import Block
from kit.private_torch import active_fake_mode
from lab.measure import solution

# What Q9 compares: the dtype of a step, and whether blocks are checkpointed.
WAYS: dict[str, tuple[torch.dtype, bool]] = {
    "fp32": (torch.float32, False),
    "AMP": (torch.bfloat16, False),
    "checkpointed": (torch.float32, True),
    "both": (torch.bfloat16, True),
}


class Gpt(nn.Module):
    """A small GPT on bytes: tokens (batch, length) to logits (batch, length, words)."""

    def __init__(self, layers: int, width: int, words: int = 256, longest: int = 1024) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.places = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, words)."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of logits (batch, length, words) and targets (batch, length)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt2(**changes: Any) -> nn.Module:
    """GPT-2 small of the transformers library, random weights; ImportError without the library.

    Called with tokens (batch, length) it returns logits; its key-value cache is off.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    return with_logits(GPT2LMHeadModel(GPT2Config(use_cache=False, **changes)))


def with_logits(model: nn.Module) -> nn.Module:
    """A model of the library that returns its logits instead of the library's record."""
    model.register_forward_hook(lambda module, args, output: output.logits)
    return model


def has_transformers() -> bool:
    """Whether the library is installed."""
    return find_spec("transformers") is not None


def parameters_of(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def large_model(
    kata: ModuleType, device: torch.device, *, full: bool, checkpoint: bool, layers: int = 32
) -> tuple[nn.Module, Tensor]:
    """Q9's model and its input: 32 layers, 1024 wide, 16 x 1024; or as narrow as a laptop likes."""
    width, batch, length = (1024, 16, 1024) if full else (128, 2, 256)
    with device:
        model = kata.LargeModel(layers, width, dropout=0.0, use_checkpoint=checkpoint)
        return model.train(), torch.zeros(batch, length, width)


def plain_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer: Optimizer,
    *,
    dtype: torch.dtype,
) -> None:
    """amp_loop's train_step without what looks at values."""
    optimizer.zero_grad()
    inputs, targets = batch
    with torch.autocast(inputs.device.type, dtype=dtype, enabled=dtype != torch.float32):
        loss = loss_fn(model(inputs).float(), targets)
    loss.backward()
    optimizer.step()


def train_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer: Optimizer,
    *,
    dtype: torch.dtype,
) -> None:
    """amp_loop's train_step; in a dry run, which has no values, `plain_step`."""
    step = plain_step if active_fake_mode() else solution("amp_loop").train_step
    step(model, batch, loss_fn, optimizer, dtype=dtype)
