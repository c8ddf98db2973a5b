"""Models that weigh their inputs, or are hardly padded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.ranks.shapes import SHAPES, Shape, made
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


ROWS, COLUMNS, TALL_BLOCKS = 4093, 8, 6
WIDE, WIDE_BLOCKS = 61, 3
NARROW, CLASSES = 40, 400

narrow, one_block = made(width=NARROW, blocks=3), made(width=NARROW, blocks=1)


def tall() -> Shape:
    """Six blocks of 65,488 numbers, 256 KiB each; 4,093 rows are 3 less than 8 x 512, 64 x 64 and
    1,024 x 4. What is first runs last.
    """
    draw.seed(4)
    blocks = [Tall(ROWS, COLUMNS) for _ in range(TALL_BLOCKS)]
    return Backwards(nn.Linear(COLUMNS, OUTPUTS), *blocks, nn.Linear(FEATURES, COLUMNS)), Tall


def wide() -> Shape:
    """Three blocks of 22,815 numbers, 89 KiB each. On 64 ranks and more there are ranks without
    rows of some parameters, and much padding.
    """
    return make(WIDE, WIDE_BLOCKS), Block


def classes() -> Shape:
    """One narrow block, and an output of many classes."""
    model = make(NARROW)
    model.head = nn.Linear(NARROW, CLASSES)
    return model, Block


def detached() -> Shape:
    """A block whose output has no graph: it and what is before it run, and get no gradients."""
    model = make(blocks=2)
    model.blocks[0].register_forward_hook(lambda module, args, output: output.detach())
    return model, Block


def silent() -> Shape:
    """All gradients are 0."""
    model = make(blocks=2)
    model.scale.zero_()
    return model, Block


def dropping_by_keyword() -> Shape:
    """Blocks with dropout, which take their tensors by keyword."""
    model, kinds = SHAPES["keywords and tuples"]()
    for block in model.modules():
        if isinstance(block, kinds):
            block.drop = 0.4
    return model, kinds


class Weigh(nn.Module):
    """x * weight, and what blocks inside make of x: the gradient of each weight is the sum of x."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.inside = nn.ModuleList(inside)

    def forward(self, x: Tensor) -> Tensor:
        return sum((block(x) for block in self.inside), x * self.weight)


class Ending(Block):
    """A block that ends in float32, as norms do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


def ending() -> Shape:
    model = make(blocks=0)
    model.blocks.extend(Ending(WIDTH) for _ in range(2))
    return model, Block


def slim() -> Shape:
    """Each parameter has one row; what comes out stands for all outputs."""
    draw.seed(4)
    return nn.Sequential(nn.Linear(FEATURES, 1), nn.Sequential(nn.Linear(1, 1))), nn.Sequential


class Placed(Block):
    """A block that is told in a dict what to add to its input."""

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> Tensor:
        return super().forward(x + more["places"])


class Tabled(nn.Module):
    """From tokens, by a float32 buffer, as a table of places is: what blocks get is float32. A dict
    may have a mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH))
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Placed(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, tokens: Tensor, *, more: dict[str, Tensor] | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x * self.table, more={"places": x * self.table})
        out: Tensor = self.head(x * more["mask"] if more else x)
        return out


def tabled() -> Shape:
    draw.seed(4)
    return Tabled(), Placed
