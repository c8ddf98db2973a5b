"""The models that the experiments train, their steps, and real text."""

from __future__ import annotations

import argparse
import inspect
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from kit.laws.toys import Block, text_batches
from kit.private_torch import active_fake_mode
from lab.measure import solution

Batch = tuple[Tensor, Tensor]  # of text: bytes and the next ones, both (batch, length) int64
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
    """GPT-2 small of the transformers library, random weights.

    Called with tokens (batch, length) it returns logits; its key-value cache is off.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    return with_logits(GPT2LMHeadModel(GPT2Config(use_cache=False, **changes)))


def with_logits(model: nn.Module) -> nn.Module:
    """A model of the library that returns its logits instead of the library's record."""
    model.register_forward_hook(lambda module, args, output: output.logits)
    return model


def parameters_of(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def plain_step(
    model: nn.Module,
    batch: Batch,
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


def train_step(*arguments: Any, **options: Any) -> None:
    """amp_loop's train_step; in a dry run, which has no values, `plain_step`."""
    step = plain_step if active_fake_mode() else solution("amp_loop").train_step
    step(*arguments, **options)


def text(device: torch.device, count: int, batch: int, length: int) -> list[Batch]:
    """So many batches of documentation, on the device."""
    batches = text_batches(count, batch, length)
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]


def source_batches(count: int, batch: int, length: int) -> Iterator[Batch]:
    """Text of another kind: the source of a module that every CPython ships."""
    data = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8)
    for _ in range(count):
        starts = torch.randint(len(data) - length - 1, (batch,)).tolist()
        rows = torch.stack([data[start : start + length + 1] for start in starts]).long()
        yield rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def loss_on(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean loss over these batches, in float32."""
    return statistics.mean(next_token(model(x), y).item() for x, y in batches)
