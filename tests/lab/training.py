"""What experiments that train share: the model of their device, and real text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kit.laws.toys import text_batches
from lab.models import Gpt, gpt2, next_token

Batch = tuple[Tensor, Tensor]  # bytes and the next ones, both (batch, length) int64


def gpt2_small(**changes: float) -> tuple[nn.Module, str]:
    """GPT-2 small without dropout, and what to call it; one of ours without transformers."""
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    try:
        return gpt2(**none, **changes).train(), "GPT-2 small"
    except ImportError:
        return Gpt(12, 768, words=50257), "a GPT of GPT-2 small's depth, width and words"


def text(device: torch.device, count: int, batch: int, length: int) -> list[Batch]:
    """So many batches of real text, on the device."""
    batches = text_batches(count, batch, length)
    return [(inputs.to(device), targets.to(device)) for inputs, targets in batches]


@torch.no_grad()
def loss_on(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean loss over these batches, in float32."""
    return statistics.mean(next_token(model(x), y).item() for x, y in batches)


def means(values: Sequence[float], most: int = 24) -> tuple[list[float], list[float]]:
    """At most so many points of a noisy curve: the middle of each stretch, and its mean."""
    size = -(-len(values) // most)
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return (
        [number * size + (len(part) + 1) / 2 for number, part in enumerate(parts)],
        [statistics.mean(part) for part in parts],
    )
