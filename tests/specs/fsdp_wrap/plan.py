"""The dry run of fsdp_wrap: billions of parameters, wrapped by an answer, without memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.laws.toys import Block
from kit.memory.account import Account, account
from kit.memory.plan import Plan, Row
from kit.ranks.collectives import collectives
from kit.ranks.simulated import dry_run

SIZES = {"layers": 12, "width": 6144, "words": 32_000, "ranks": 64, "batch": 1, "length": 2048}
HEAD = 128  # the width of an attention head

# All parameters in one operation, as is the default on cuda.
adamw = functools.partial(torch.optim.AdamW, foreach=True)

# What wrap is asked for; the names are the rows of the table.
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


def rehearse(
    prepare: Callable[[nn.Module, Any], torch.optim.Optimizer],
    make_model: Callable[[], nn.Module],
    ranks: int,
    tokens: tuple[int, int],
    steps: int = 2,
) -> tuple[Account, Counter[str]]:
    """What the last step of training holds and calls, on rank 0 of so many; no value is computed.

    `prepare` gets the model and the mesh and returns the optimizer.
    """
    world: AbstractContextManager[Any] = dry_run(ranks)
    with world as mesh:
        model = make_model()
        optimizer = prepare(model, mesh)
        inputs, targets = (torch.zeros(tokens, dtype=torch.int64) for _ in range(2))

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()

        for _ in range(steps - 1):
            step()  # the first one makes the optimizer's state
        with collectives() as calls:
            books = account(step, model=model, optimizer=optimizer, known=[inputs, targets])
    return books, Counter(call.kind for call in calls)


def plan(answer: ModuleType, **sizes: int) -> Plan:
    """The table for one answer: one process, and what `wrap` makes of it in each way."""
    layers, width, words, ranks = (sizes[key] for key in ("layers", "width", "words", "ranks"))
    if width % HEAD:
        raise ValueError(f"width must be a multiple of {HEAD}, the width of a head, not {width}")

    def make_model() -> LargeModel:
        return LargeModel(layers, width, words)

    def alone(model: nn.Module, mesh: Any) -> torch.optim.Optimizer:
        return adamw(model.parameters())

    tokens = (sizes["batch"], sizes["length"])
    rows = [_row("one process, float32", *rehearse(alone, make_model, 1, tokens))]
    for label, options in WAYS.items():

        def wrapped(
            model: nn.Module, mesh: Any, options: dict[str, Any] = options
        ) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = answer.wrap(model, mesh, Block, adamw, **options)
            return optimizer

        rows.append(_row(label, *rehearse(wrapped, make_model, ranks, tokens)))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in make_model().parameters())
    return Plan(
        f"{parameters / 1e9:.2f} billion parameters on {ranks} ranks, "
        f"{tokens[0]} x {tokens[1]} tokens each, AdamW",
        rows,
        [
            f"Rank 0 at the peak of a step; {layers} blocks of width {width}, {words} words.",
            "Counted on fake tensors by the rules for the cpu. On cuda there is more: what cuBLAS",
            "works with, and the gaps that the allocator leaves.",
        ],
    )


def _row(label: str, books: Account, calls: Counter[str]) -> Row:
    gathers, reductions = calls["all_gather"], calls["reduce_scatter"]
    return Row(
        label,
        books.at_peak,
        books.peak,
        f"{gathers} gathers, {reductions} reductions" if gathers else "none",
    )
