"""Models of other shapes than the plain one, with the classes of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.ranks.toys import FEATURES, OUTPUTS, Block, make

Shape = tuple[nn.Module, Any]  # the model and its block_types


class Outer(nn.Module):
    """A block with a block inside, and parameters of its own before and after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.inner = Block(width)
        self.gain = nn.Parameter(torch.full((width,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.gate(x))) * self.gain


class Deep(Block):
    """A block of a subclass, around a block that is around one."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.outer = Outer(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.outer(x))


class Twice(nn.Module):
    """One block that runs twice, and stands in the tree at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 13)
        self.first = Block(13)
        self.other = Block(13)
        self.again = self.first
        self.head = nn.Linear(13, OUTPUTS)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.again(self.other(self.first(self.embed(inputs)))))


class Talker(nn.Module):
    """A block with keywords only, which returns more than one tensor; two weights are one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.two.weight = self.one.weight

    def forward(self, *, x: Tensor, seen: dict[str, Tensor], scale: float) -> Any:
        y = torch.tanh(self.one(x)) * scale
        return y + self.two(y), {"sum": seen["sum"] + y.sum(-1, keepdim=True)}


class Talk(nn.Module):
    """Blocks that pass on a tuple; the head, which is a block too, comes first in the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Block(OUTPUTS)
        self.blocks = nn.ModuleDict({"a": Talker(FEATURES), "b": Talker(FEATURES)})
        self.out = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, inputs: Tensor) -> Tensor:
        x, seen = inputs, {"sum": torch.zeros_like(inputs[:, :1])}
        for block in self.blocks.values():
            x, seen = block(x=x, seen=seen, scale=0.7)
        return self.head(self.out(x)) + seen["sum"]


class Tall(nn.Module):
    """x + down^T relu(up x), with many more rows than ranks in both: hardly anything is padded."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(draw.randn(rows, width) / rows)
        self.down = nn.Parameter(draw.randn(rows, width) / rows)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(x @ self.up.T) @ self.down


class Weigh(nn.Module):
    """x * weight: the weight's gradient is the sum of x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class WeighTwice(nn.Module):
    """A weight in a block, and one in the root; both have the sum of x for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Weigh()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + x * self.weight


class Watched(nn.Module):
    """A block with integers and flags beside its input, which notes dtypes.

    It has no Linear, which would raise where dtypes are mixed.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, places: Tensor, *, mask: Tensor) -> Tensor:
        self.seen = {
            "input of a block": x.dtype,
            "weight in a block": self.weight.dtype,
            "integers": places.dtype,
            "flags": mask.dtype,
        }
        return x + torch.relu(x * self.weight) * mask


class WatchedModel(nn.Module):
    """Two watched blocks; it notes what the first one returns, and what it computes itself.

    What the second one gets is float32: a buffer is, and has made it so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(FEATURES))
        self.first, self.second = Watched(FEATURES), Watched(FEATURES)
        self.gain = nn.Parameter(torch.ones(FEATURES))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, inputs: Tensor, places: Tensor, *, more: dict[str, Tensor]) -> Any:
        x = self.first(inputs, places, mask=more["mask"])
        y = self.second(x * self.table, places, mask=more["mask"])
        out = y * self.gain
        self.seen = {
            "what a block returns": x.dtype,
            "weight in the root": self.gain.dtype,
            "what the root computes": out.dtype,
            "keywords of the model": more["shift"].dtype,
        }
        return {"out": (out, out + more["shift"]), "places": places}


def nested() -> Shape:
    draw.seed(4)
    layers = [Outer(13), Deep(13)]
    return nn.Sequential(nn.Linear(FEATURES, 13), *layers, nn.Linear(13, OUTPUTS)), (Block, Outer)


def only_blocks() -> Shape:
    """The root has no parameters of its own."""
    draw.seed(4)
    return nn.Sequential(nn.Linear(FEATURES, 13), nn.Tanh(), nn.Linear(13, OUTPUTS)), nn.Linear


def frozen() -> Shape:
    """All of a block that backward goes through, one weight of another, and a part of the root's
    unit, in which two weights are one.
    """
    names = ["blocks.0", "blocks.1.up.weight", "embed.weight", "head"]
    return make(blocks=2, tied=True, frozen=names), Block


def frozen_beginning() -> Shape:
    """Backward comes to an end before the first block."""
    return make(blocks=2, frozen=["embed", "blocks.0"]), Block


def a_block_twice() -> Shape:
    draw.seed(4)
    return Twice(), Block


def talking() -> Shape:
    draw.seed(4)
    return Talk(), (Talker, Block)


def root_of_the_class() -> Shape:
    draw.seed(4)
    inner = nn.Sequential(nn.Linear(FEATURES, 13), nn.Tanh())
    return nn.Sequential(inner, nn.Linear(13, OUTPUTS)), nn.Sequential


def made(**options: Any) -> Callable[[], Shape]:
    """The small model of the kit with these options."""
    return lambda: (make(**options), Block)


def reader() -> Shape:
    """From tokens (samples, length) to (samples, length, 3)."""
    draw.seed(4)
    return nn.Sequential(nn.Embedding(11, 13), Block(13), nn.Linear(13, OUTPUTS)), Block


SHAPES: dict[str, Callable[[], Shape]] = {
    "odd sizes": made(blocks=2),
    "frozen": frozen,
    "frozen beginning": frozen_beginning,
    "tied in the root": made(tied=True),
    "nested": nested,
    "only blocks": only_blocks,
    "a block twice": a_block_twice,
    "keywords and tuples": talking,
    "the root is of the class": root_of_the_class,
}
