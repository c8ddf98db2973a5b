"""Models whose bytes are easy to count, and some that are hard to train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.ranks.shapes import Shape, made
from kit.ranks.toys import FEATURES, OUTPUTS, WIDTH, Block, make


class Tall(nn.Module):
    """x + down^T relu(up x); both have many more rows than there are ranks, so little padding."""

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
    """Six blocks of 65,488 numbers, 256 KiB each; 4,093 rows are 3 less than 8 x 512 and 64 x 64.
    The first module runs last.
    """
    draw.seed(4)
    blocks = [Tall(ROWS, COLUMNS) for _ in range(TALL_BLOCKS)]
    return Backwards(nn.Linear(COLUMNS, OUTPUTS), *blocks, nn.Linear(FEATURES, COLUMNS)), Tall


def wide() -> Shape:
    """Three blocks of 22,815 numbers, 89 KiB each. On 64 ranks some ranks have no rows of some
    parameters, and there is much padding.
    """
    return make(WIDE, WIDE_BLOCKS), Block


def classes() -> Shape:
    """One narrow block, and an output of many classes."""
    model = make(NARROW)
    model.head = nn.Linear(NARROW, CLASSES)
    return model, Block


class Weigh(nn.Module):
    """x * weight + the blocks inside of x: the gradient of each weight is the sum of x."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.inside = nn.ModuleList(inside)

    def forward(self, x: Tensor) -> Tensor:
        return sum((block(x) for block in self.inside), x * self.weight)


def slim() -> Shape:
    """Each parameter has one row; the one output is compared with all targets."""
    draw.seed(4)
    return nn.Sequential(nn.Linear(FEATURES, 1), nn.Tanh(), nn.Linear(1, 1)), nn.Linear


class Placed(Block):
    """A block that takes by keyword what it adds to its input."""

    def forward(self, x: Tensor, *, places: Tensor) -> Tensor:
        return super().forward(x + places)


class Tabled(nn.Module):
    """From tokens (samples, length); a float32 buffer makes all inputs of blocks float32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH))
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Placed(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x * self.table, places=x * self.table)
        out: Tensor = self.head(x)
        return out


def tabled() -> Shape:
    draw.seed(4)
    return Tabled(), Placed
