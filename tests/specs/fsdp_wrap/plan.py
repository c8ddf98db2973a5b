"""The dry run of fsdp_wrap: billions of parameters, wrapped by an answer, without memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.laws.toys import Block
from kit.memory.account import account
from kit.memory.plan import Plan, Row
from kit.ranks.collectives import collectives
from kit.ranks.simulated import dry_run

SIZES = {"layers": 12, "width": 6144, "words": 32_000, "ranks": 64, "batch": 1, "length": 2048}
HEAD = 128  # the width of an attention head

# All parameters in one operation, as is the default on cuda.
adamw = functools.partial(torch.optim.AdamW, foreach=True)

Wrap = Callable[..., torch.optim.Optimizer]

# Options of wrap; the names are the rows of the table.
WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "not resharded after forward": {"reshard_after_forward": False},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, checkpointed": {"dtype": torch.bfloat16, "checkpoint": True},
}


class LargeModel(nn.Module):
    """A language model: tokens (samples, length) to logits (samples, length, words)."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, width // HEAD) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def plan(answer: ModuleType, **sizes: int) -> Plan:
    """The table for one answer: one process, then `wrap` with each set of options."""
    layers, width, words, ranks = (sizes[key] for key in ("layers", "width", "words", "ranks"))
    if width % HEAD:
        raise ValueError(f"width must be a multiple of {HEAD}, the width of a head, not {width}")
    tokens = (sizes["batch"], sizes["length"])
    make_model = functools.partial(LargeModel, layers, width, words)
    alone: Wrap = lambda model, *_: adamw(model.parameters())  # noqa: E731
    rows = [_row("one process, float32", alone, make_model, 1, tokens)]
    for label, options in WAYS.items():
        wrap = functools.partial(answer.wrap, **options)
        rows.append(_row(label, wrap, make_model, ranks, tokens))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in make_model().parameters())
    return Plan(
        f"{parameters / 1e9:.2f} billion parameters on {ranks} ranks, "
        f"{tokens[0]} x {tokens[1]} tokens each, AdamW",
        rows,
        [
            f"Rank 0 at the peak of a step; {layers} blocks of width {width}, {words} words.",
            "gradients: whole until they are reduced, then this rank's part.",
            "unsharded: gathered parameters.",
            "communication: the buffers of gathers and reductions.",
            "activations: also temporaries of backward, loss and optimizer.",
            "Counted on fake tensors by the rules for the cpu. On cuda there are also workspaces "
            "of cuBLAS and gaps in the allocator.",
        ],
    )


def _row(
    label: str,
    wrap: Wrap,
    make_model: Callable[[], nn.Module],
    ranks: int,
    tokens: tuple[int, int],
) -> Row:
    """What the second step holds and calls on rank 0; no values are computed."""
    with dry_run(ranks) as mesh:
        model = make_model()
        optimizer = wrap(model, mesh, Block, adamw)
        inputs, targets = (torch.zeros(tokens, dtype=torch.int64) for _ in range(2))

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()

        step()  # the first one makes the optimizer's state
        with collectives() as calls:
            books = account(step, model=model, optimizer=optimizer, known=[inputs, targets])
    kinds = Counter(call.kind for call in calls)
    gathers, reductions = kinds["all_gather"], kinds["reduce_scatter"]
    sent = f"{gathers} gathers, {reductions} reductions" if gathers else "none"
    return Row(label, books.at_peak, books.peak, sent)
