"""GPT-2 with its blocks checkpointed by the reference: peaks at full size, times, operations."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.optim import AdamW

from kit.memory.stack import by_kind
from lab.chains import flops_of
from lab.measure import Made, alternating, books_at_full_size, solution
from lab.models import gpt2, next_token, train_step

LENGTH = 512
MEDIUM = {"n_layer": 24, "n_embd": 1024, "n_head": 16}
# The same proportions, so that a laptop can run it: products of matrices have most of the work.
SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 256, "n_positions": 128}
SMALL |= {"bos_token_id": 0, "eos_token_id": 0}  # bytes, and not the words of GPT-2
WAYS = ("plain", "checkpointed", "matrix products kept")


def make(way: str, shape: dict[str, int], batch: int) -> Made:
    """A float32 step with AdamW; without attention's dropout, so that attention is one kernel."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    model = gpt2(**shape, attn_pdrop=0.0).train()
    kata = solution("checkpointed_model")
    if way != "plain":
        keep = kata.DEAR if way == "matrix products kept" else ()
        kata.checkpoint_blocks(model, GPT2Block, keep=keep)
    x = torch.zeros(batch, shape.get("n_positions", LENGTH), dtype=torch.int64)
    optimizer = AdamW(model.parameters(), foreach=True)
    step = partial(train_step, model, (x, x), next_token, optimizer, dtype=torch.float32)
    return step, model, optimizer, [x]


def peaks(batch: int, device: torch.device) -> dict[str, dict[str, int]]:
    """Bytes by kind at the peak of a step of GPT-2 medium, plain and checkpointed."""
    made = {way: partial(make, way, MEDIUM, batch) for way in WAYS[:2]}
    return {way: by_kind(books_at_full_size(step, device)) for way, step in made.items()}


def seconds(device: torch.device, *, rounds: int, limit: float) -> dict[str, Any]:
    """Seconds and operations of a step: of GPT-2 medium on cuda, of a small one elsewhere."""
    with device:
        shape = MEDIUM if device.type == "cuda" else SMALL
        steps = {way: make(way, shape, batch=4)[0] for way in WAYS}
    found = alternating(steps, device, rounds, limit)
    return {"seconds": found, "flops": {way: flops_of(step) for way, step in steps.items()}}
