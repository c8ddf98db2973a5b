"""Models that notice dtypes, weigh their inputs, or are hardly padded."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kit.laws import draw
from kit.ranks.shapes import SHAPES, Deep, Shape, nested
from kit.ranks.toys import FEATURES, OUTPUTS, WIDTH, Block, make


class Tall(nn.Module):
    """x + down^T relu(up x), with many more rows than ranks in both: hardly anything is padded."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(draw.randn(rows, width) / rows)
        self.down = nn.Parameter(draw.randn(rows, width) / rows)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(x @ self.up.T) @ self.down


class Backwards(nn.Sequential):
    """The last module runs first."""

    def forward(self, x: Tensor) -> Tensor:
        for module in reversed(self):
            x = module(x)
        return x


class Weigh(nn.Module):
    """x * weight, and what blocks inside make of x: the gradient of each weight is the sum of x."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.inside = nn.ModuleList(inside)

    def forward(self, x: Tensor) -> Tensor:
        return sum((block(x) for block in self.inside), x * self.weight)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def widened(more: dict[str, Any], table: Tensor) -> dict[str, Any]:
    """The keywords with a shift that a wider table has been multiplied into."""
    shift, places = more["shifts"][0]
    return more | {"shifts": [Pair(shift * table, places)]}


class Watched(nn.Module):
    """A block with integers and flags beside its input, perhaps around another one, which notes
    dtypes; by a float32 buffer what it passes on and what it computes is float32 in the end.

    It has no Linear, which would raise where dtypes are mixed.
    """

    def __init__(self, inside: Watched | None = None) -> None:
        super().__init__()
        self.inside = inside
        self.weight = nn.Parameter(torch.ones(FEATURES))
        self.register_buffer("table", torch.ones(FEATURES))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, places: Tensor, *, more: Any) -> Tensor:
        shift = more["shifts"][0].first
        self.seen = {
            "input of a block": x.dtype,
            "weight in a block": self.weight.dtype,
            "keywords of a block": shift.dtype,
            "integers": places.dtype,
            "flags": more["mask"].dtype,
        }
        if self.inside is not None:
            x = self.inside(x * self.table, places, more=widened(more, self.table))
            self.seen["what a block returns"] = x.dtype
        return x + torch.relu(x * self.weight) * more["mask"] * self.table + shift


class WatchedModel(nn.Module):
    """A watched block in another, which get float64 and float32, as buffers have made them; it
    notes what they return, and what it computes itself, with a parameter or without.
    """

    def __init__(self, has_gain: bool = True) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(FEATURES, dtype=torch.float64))
        self.block = Watched(Watched())
        self.gain = nn.Parameter(torch.ones(FEATURES)) if has_gain else None
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, inputs: Tensor, places: Tensor, *, more: dict[str, Any]) -> Any:
        shift = more["shifts"][0].first
        x = self.block(inputs * self.table, places, more=widened(more, self.table))
        out = x + torch.relu(inputs) if self.gain is None else x * self.gain
        self.seen = {
            "input of the model": inputs.dtype,
            "what a block returns": x.dtype,
            "weight in the root": (out if self.gain is None else self.gain).dtype,
            "what the root computes": out.dtype,
            "keywords of the model": shift.dtype,
        }
        return {"out": Pair(out, (out + shift) * self.table), "places": places}


class Row(nn.Module):
    """A block of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(draw.randn(1, OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.row)


def single_rows() -> Shape:
    """Every parameter has one row: only the first rank holds anything."""
    draw.seed(4)
    return nn.Sequential(nn.Linear(FEATURES, 1), Row()), Row


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


class Told(Block):
    """A block that is told by keywords how much it counts, in shares."""

    def forward(self, x: Tensor, **shares: float) -> Tensor:
        return super().forward(x) * sum(shares.values())


def any_names() -> Shape:
    """Blocks with keywords that torch's checkpoint has too, or a wrapper of forward may have; and
    one that has nothing to shard.
    """
    model = make(blocks=2)
    names = {*inspect.signature(checkpoint).parameters, "preserve_rng_state", "forward", "block"}
    shares = dict.fromkeys(names, 1 / len(names))
    # One name begins with the other: names do not tell which block is inside which.
    told = OrderedDict(told=Told(WIDTH), told_too=Told(WIDTH))
    for block in told.values():
        block.register_forward_pre_hook(lambda _, args, __: (args, shares), with_kwargs=True)
    model.blocks = nn.Sequential(told | {"bare": Bare()})
    return model, (Told, Bare)


class Adding(nn.Module):
    """Keeps nothing for backward, so that its second run may be left out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.Parameter(torch.linspace(-1, 1, 5 * width).view(5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.parts.sum(0)


class Ending(nn.Module):
    """A block that ends with another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(width, width), Adding(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.gate(x)))
        return out


def ending() -> Shape:
    draw.seed(4)
    first, last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, OUTPUTS)
    return nn.Sequential(first, Ending(WIDTH), Ending(WIDTH), last), (Ending, Adding)


class Moment(NamedTuple):
    """A state, and its time in seconds: in float32 those of today are 128 apart."""

    x: Tensor
    time: Tensor


class Timed(Block):
    """A block from one moment to the next, which weighs its input by the time."""

    def forward(self, moment: Moment) -> Moment:
        weight = torch.cos(moment.time).float()
        return Moment(super().forward(moment.x * weight[:, None]), moment.time + 1)


class Times(nn.Module):
    """Timed blocks, from inputs at a time in float64, to a result in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.blocks = nn.Sequential(Timed(), Timed())

    def forward(self, inputs: Tensor) -> Tensor:
        moment = Moment(self.embed(inputs), 1.7e9 + inputs[:, 0].double())
        out: Tensor = self.head(self.blocks(moment).x)
        return out.double()


def timed() -> Shape:
    """Blocks that take and return a namedtuple, with a part in float64; so is the result."""
    draw.seed(4)
    return Times(), Timed


def dropping_twice() -> Shape:
    """Blocks with dropout, one of which runs twice."""
    return _dropping("a block twice")


def dropping_in_eval_mode() -> Shape:
    """Blocks with dropout that no mode turns off, in a forward that is the object's own; the model
    fills their buffers from its inputs.
    """
    model = make(blocks=2)
    for block in model.blocks:
        block.register_buffer("heat", torch.ones(()), persistent=False)
        block.forward = MethodType(lambda b, x: F.dropout(Block.forward(b, x * b.heat), 0.4), block)

    def fill(_: nn.Module, inputs: tuple[Tensor]) -> None:
        for block in model.blocks:
            block.heat.copy_(inputs[0].mean().exp())

    model.register_forward_pre_hook(fill)
    return model, Block


def dropping_by_keyword() -> Shape:
    """Blocks with dropout, which take their tensors by keyword."""
    return _dropping("keywords and tuples")


def _dropping(name: str) -> Shape:
    model, kinds = SHAPES[name]()
    for block in model.modules():
        if isinstance(block, kinds):
            block.drop = 0.4
    return model, kinds


def look_alikes() -> Shape:
    """`nested`, but two weights, without a bias, are slices of one tensor, and the class of the
    head, which is not that of blocks, has its name.
    """
    model, kinds = nested()
    for outer, gate in zip((model[1], model[2].outer[0]), torch.ones(2, WIDTH, WIDTH), strict=True):
        outer.gate.weight, outer.gate.bias = nn.Parameter(gate), None
    model[3] = type("Block", (nn.Linear,), {})(WIDTH, OUTPUTS)
    return model, kinds


def with_a_subclass() -> Shape:
    """`nested`, and the class of the second block, a subclass, is named too."""
    model, kinds = nested()
    return model, (*kinds, Deep)


class Begin(nn.Linear):
    """Places, integers, and what a Linear makes of its input."""

    def forward(self, x: Tensor) -> Any:
        return x.argmax(-1), super().forward(x)


class Place(Block):
    """A block that gets places before its input, and returns some before its output."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Any:
        return pair[0] + 1, super().forward(pair[1])


def integers_first() -> Shape:
    """Blocks, one of them frozen, and the model return integers first."""
    blocks = [Place(OUTPUTS) for _ in range(3)]
    blocks[1].requires_grad_(False)
    return nn.Sequential(Begin(FEATURES, OUTPUTS), *blocks), Place
