"""Models as users have them, other than the plain one, with the classes of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.ranks.toys import FEATURES, OUTPUTS, WIDTH, Block, make

Shape = tuple[nn.Module, Any]  # the model and its block_types


class Outer(nn.Module):
    """A block with a block inside, and parameters of its own before and after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Block(width)
        self.gate = nn.Linear(width, width)  # after it, where an order of modules() shows
        self.gain = nn.Parameter(torch.full((width,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(torch.tanh(self.gate(x))) * self.gain
        return out


class Deep(Block):
    """A block of a subclass, around one in a Sequential that is around another."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.outer = nn.Sequential(Outer(width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.outer(x))


def nested() -> Shape:
    draw.seed(4)
    first, last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, OUTPUTS)
    return nn.Sequential(first, Outer(WIDTH), Deep(WIDTH), last), (Block, Outer)


def only_blocks() -> Shape:
    """The root has no parameters of its own."""
    draw.seed(4)
    first, last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, OUTPUTS)
    return nn.Sequential(first, nn.Tanh(), last), nn.Linear


def frozen() -> Shape:
    """All of a block that backward goes through, the beginning of another, and a part of the root's
    unit, in which two weights are one.
    """
    names = ["blocks.0", "blocks.1.norm", "blocks.1.up", "embed.weight", "head"]
    return make(blocks=2, tied=True, frozen=names), Block


def frozen_beginning() -> Shape:
    """Backward comes to an end before the first block."""
    return make(blocks=2, frozen=["embed", "blocks.0"]), Block


def made(**options: Any) -> Callable[[], Shape]:
    """The small model of the kit with these options."""
    return lambda: (make(**options), Block)


SHAPES: dict[str, Callable[[], Shape]] = {
    "odd sizes": made(blocks=2),
    "frozen": frozen,
    "frozen beginning": frozen_beginning,
    "tied in the root": made(tied=True),
    "nested": nested,
    "only blocks": only_blocks,
}
