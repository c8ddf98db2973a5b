"""Models that notice dtypes, weigh their inputs, or are hardly padded."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kit.laws import draw
from kit.ranks.shapes import Shape
from kit.ranks.toys import FEATURES, WIDTH, Block, make


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
    """A block with integers and flags beside its input, which notes dtypes; by a float32 buffer
    what it computes is float32 in the end.

    It has no Linear, which would raise where dtypes are mixed.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("table", torch.ones(width))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, places: Tensor, *, mask: Tensor) -> Tensor:
        self.seen = {
            "input of a block": x.dtype,
            "weight in a block": self.weight.dtype,
            "integers": places.dtype,
            "flags": mask.dtype,
        }
        return x + torch.relu(x * self.weight) * mask * self.table


class Around(nn.Module):
    """A block with a watched one inside; it notes what it gets itself, and what that returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = Watched(width)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, places: Tensor, *, mask: Tensor) -> Tensor:
        y: Tensor = self.inside(x, places, mask=mask)
        mine = {"input of a block": x.dtype, "what a block returns": y.dtype}
        self.seen = {**self.inside.seen, **mine}
        return y


class WatchedModel(nn.Module):
    """Two watched blocks, one in another; it notes what the first one returns, and what it
    computes itself.

    What the second one gets is float32: a buffer is, and has made it so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(FEATURES))
        self.first, self.second = Watched(FEATURES), Around(FEATURES)
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


def detached() -> Shape:
    """A block whose output has no graph: it and what is before it run, and get no gradients."""
    model = make(blocks=2)
    model.blocks[0].register_forward_hook(lambda module, args, output: output.detach())
    return model, Block


class Bare(nn.Module):
    """A block without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.exp(self.tanh(x))


def bare() -> Shape:
    """The second of two blocks has nothing to shard."""
    model = make(blocks=1)
    model.blocks = nn.Sequential(*model.blocks, Bare())
    return model, (Block, Bare)


class Told(Block):
    """A block that is told by keywords how much it counts, in shares."""

    def forward(self, x: Tensor, **shares: float) -> Tensor:
        return super().forward(x) * sum(shares.values())


def any_names() -> Shape:
    """Blocks with keywords that torch's checkpoint has too, or a wrapper of forward may have."""
    model = make(blocks=2)
    names = {*inspect.signature(checkpoint).parameters, "preserve_rng_state", "forward", "block"}
    shares = dict.fromkeys(names, 1 / len(names))
    # One name begins with the other: names do not tell which block is inside which.
    model.blocks = nn.Sequential(OrderedDict(told=Told(WIDTH), told_too=Told(WIDTH)))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args, __: (args, shares), with_kwargs=True)
    return model, Told
