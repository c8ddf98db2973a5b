"""A small model with blocks and its data, the same on every rank; no size divides by 2 or 4."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.laws import draw

Batch = tuple[Tensor, Tensor]

FEATURES, OUTPUTS, WIDTH = 5, 3, 13


class Block(nn.Module):
    """x + down(drop(tanh(up(norm(x))))); the hidden width is 3 * width + 1.

    Dropout is a function here, and no module that one could look for.
    Smooth, as everything whose gradients are compared in two precisions: see kit.laws.toys.mlp.
    """

    def __init__(self, width: int = WIDTH, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.drop = drop
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        out: Tensor = x + self.down(F.dropout(hidden, self.drop, self.training))
        return out


class Model(nn.Module):
    """From (samples, 5) to (samples, 3); 4 ranks share 3 rows of the head.

    With `tied`, `again` has the weight of `embed`: both are outside of the blocks.
    """

    def __init__(
        self, width: int = WIDTH, blocks: int = 2, *, drop: float = 0.0, tied: bool = False
    ) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(width, drop) for _ in range(blocks))
        self.again = nn.Linear(FEATURES, width) if tied else None
        if self.again is not None:
            self.again.weight = self.embed.weight
        self.head = nn.Linear(width, OUTPUTS)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        if self.again is not None:
            x = x + self.again(inputs)
        out: Tensor = self.head(x) * self.scale
        return out


def make(
    width: int = WIDTH,
    blocks: int = 1,
    *,
    drop: float = 0.0,
    tied: bool = False,
    frozen: Sequence[str] = (),
    seed: int = 4,
) -> Model:
    """The same values in every process; `frozen` are the beginnings of names.

    The width is that of all small models: to DTensor each new shape is work for milliseconds.
    """
    draw.seed(seed)
    return freeze(Model(width, blocks, drop=drop, tied=tied), frozen)


def freeze(model: Model, frozen: Sequence[str]) -> Model:
    """Parameters whose names begin so require no gradient, all others do."""
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(tuple(frozen)))
    return model


def data(samples: Sequence[int], seed: int) -> list[Batch]:
    """Batches of so many samples; no two seeds, and no two batches, have the same data."""
    generator = draw.generator(seed)
    return [
        (
            draw.randn(count, FEATURES, generator=generator) + number / 2,
            draw.randn(count, OUTPUTS, generator=generator) - number / 2,
        )
        for number, count in enumerate(samples)
    ]
