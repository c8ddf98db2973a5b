"""GPT-2 with its blocks checkpointed by the reference: peaks at full size, times, operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from kit.laws.toys import text_batches
from kit.memory.stack import by_kind
from kit.private_torch import active_fake_mode
from lab.chains import flops_of
from lab.measure import alternating, books_of, rehearsed, solution
from lab.models import gpt2, next_token, train_step

LENGTH = 512
MEDIUM = {"n_layer": 24, "n_embd": 1024, "n_head": 16}
# The same proportions, so that a laptop can run it: products of matrices have most of the work.
SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 256, "n_positions": 128}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0}  # bytes, and not the words of GPT-2
WAYS = ("plain", "checkpointed", "matrix products kept")
Made = tuple[Callable[[], object], nn.Module, Optimizer, list[Any]]


def make(way: str, shape: dict[str, int], batch: int, device: torch.device) -> Made:
    """A float32 step with AdamW; without attention's dropout, so that attention is one kernel."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    with device:
        model = gpt2(**shape, attn_pdrop=0.0).train()
    kata = solution("checkpointed_model")
    if way != "plain":
        keep = kata.DEAR if way == "matrix products kept" else ()
        kata.checkpoint_blocks(model, GPT2Block, keep=keep)
    length = shape.get("n_positions", LENGTH)
    if active_fake_mode():
        x = y = torch.zeros(batch, length, dtype=torch.int64, device=device)
    else:
        x, y = (tokens.to(device) for tokens in next(text_batches(1, batch, length)))
    optimizer = AdamW(model.parameters(), foreach=True)
    step = partial(train_step, model, (x, y), next_token, optimizer, dtype=torch.float32)
    return step, model, optimizer, [x, y]


def peaks(batch: int, device: torch.device) -> dict[str, dict[str, int]]:
    """Bytes by kind at the peak of a step of GPT-2 medium, plain and checkpointed."""
    found = {}
    for way in WAYS[:2]:
        if device.type == "cuda":
            step, model, optimizer, known = make(way, MEDIUM, batch, device)
            books = books_of(step, device, model, optimizer, known)
            del step, model, optimizer, known
        else:
            books = rehearsed(partial(make, way, MEDIUM, batch, device))
        found[way] = by_kind(books)
    return found


def seconds(device: torch.device, *, rounds: int, limit: float) -> dict[str, Any]:
    """Seconds and operations of a step: of GPT-2 medium on cuda, of a small one elsewhere."""
    shape, batch = (MEDIUM, 4) if device.type == "cuda" else (SMALL, 4)
    steps = {way: make(way, shape, batch, device)[0] for way in WAYS}
    found = alternating(steps, device, rounds, limit)
    return {"seconds": found, "flops": {way: flops_of(step) for way, step in steps.items()}}
