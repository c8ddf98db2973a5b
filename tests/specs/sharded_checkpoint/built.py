"""What `build` is given, what one process makes of it, and what likely mistakes do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.equal import same
from kit.ranks.rank import device
from kit.ranks.shapes import Deep, Outer, Twice
from kit.ranks.shards import full, mesh, weights
from kit.ranks.toys import FEATURES, OUTPUTS, WIDTH, Model
from specs.sharded_checkpoint.models import Thin, sharded


class Tricky(nn.Module):
    """Blocks in blocks, one of a subclass; frozen parameters, two precisions, both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))  # one row: only rank 0 has it
        self.register_buffer("scale", torch.ones(7, 1))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(OUTPUTS), persistent=False)
        self.register_buffer("unused", None)
        self.sum = nn.Conv1d(OUTPUTS, 1, 2)  # of it only rank 0 has rows
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.head.bias.requires_grad_(False)
        self.outer = nn.Sequential(Outer(WIDTH).requires_grad_(False), Deep(WIDTH))
        self.spare = Thin().to(torch.bfloat16)
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.again = nn.Linear(FEATURES, WIDTH, bias=False)  # where it is tied, it has nothing else
        self.eval().outer.train()


class Tied(Tricky):
    """The same with one weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.again.weight = self.embed.weight


UNTIED: dict[str, Any] = {"plain": Model, "tricky": Tricky, "with a block twice": Twice}
MODELS = {**UNTIED, "tied": Tied}


def init(module: nn.Module) -> None:
    """Random values for all that is the module's own: whoever is out of order gets other ones."""
    for p in module.parameters(recurse=False):
        nn.init.normal_(p, mean=0.02, std=0.15)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
        else:
            buffer.fill_(3)


def begin() -> None:
    """The same random numbers from here on, and not from a seed on: some have been drawn."""
    draw.seed(6)
    draw.rand(3)


def alone(
    kind: str, order: Callable[[nn.Module], Iterable[nn.Module]] = nn.Module.modules
) -> nn.Module:
    """What one process has.

    To be called on a rank: `init` draws where the parameters are, and a GPU has other numbers.
    """
    with device():
        model = MODELS[kind]()
    begin()
    for module in order(model):
        init(module)
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, also the buffers that are not in the state dict."""
    return {**weights(model), **full(dict(model.named_buffers()))}


def guesses(kind: str, want: dict[str, Tensor]) -> dict[str, Any]:
    """What well-known mistakes give."""
    ranks = mesh().size()
    found = {
        "modules are initialised from the inside out": values(
            alone(kind, order=lambda m: reversed([*m.modules()]))
        ),
        "a module whose parameters are all tied to modules before is left out": values(
            alone(kind, order=lambda m: [x for x in m.modules() if x is not getattr(m, "again", 0)])
        ),
        "every rank takes the first rows": {
            name: torch.cat([value.chunk(ranks)[0]] * ranks)[: len(value)] if value.dim() else value
            for name, value in want.items()
        },
    }
    model = sharded(MODELS[kind]())
    begin()
    with torch.no_grad():
        for module in model.modules():
            init(module)
    found["init runs on shards, so every rank draws the same numbers for its own"] = values(model)
    return {belief: value for belief, value in found.items() if not same(value, want)}
