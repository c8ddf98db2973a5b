"""Small models and data that several katas use; sizes are unequal on purpose."""

from __future__ import annotations

import itertools
import pydoc_data.topics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kit.laws import draw


class Pair(NamedTuple):
    """Anything in a namedtuple, which is to come back as one."""

    first: Any
    second: Any


def mlp(
    *widths: int,
    device: torch.device | str = "cpu",
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Linear layers of these widths with an activation between; inputs are (batch, widths[0]).

    Gradients in two precisions can be compared with a smooth activation only: where rounding
    changes the sign of an input, the derivative of ReLU jumps from 0 to 1.
    """
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), activation()]
    layers[0].eval()  # as a frozen layer: a train() or eval() of the whole model does not pass
    return nn.Sequential(*layers[:-1]).to(device)


class Block(nn.Module):
    """A transformer block: normalisation, attention over (batch, length, width), feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.norm1.eval()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


def mse(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error, without the checks of torch's own."""
    return (output - target).square().mean()


def text_batches(count: int, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Real text as bytes: (batch, length) int64 inputs, and the next byte of each as target.

    The text is the documentation topics that every CPython ships, so nothing is downloaded.
    """
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text[:200_000]), dtype=torch.uint8).long()
    generator = draw.generator(0)
    for _ in range(count):
        starts = draw.randint(len(data) - length - 1, (batch,), generator=generator).tolist()
        yield (
            torch.stack([data[start : start + length] for start in starts]),
            torch.stack([data[start + 1 : start + length + 1] for start in starts]),
        )
