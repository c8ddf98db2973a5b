"""Every random number of specs, toys and ranks: drawn on the cpu, from a seed that can be moved.

    draw.seed(3)
    model, x = mlp(7, 5, device=device), draw.randn(11, 7, device=device)

Numbers are drawn on the cpu and then moved, so that a GPU sees the same weights and data.
`pytest --seed-shift N` moves every seed at once: a verdict that changes with N depends on luck. The
shift stands in the environment, which ranks and the processes of the desk inherit.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

SHIFT_VARIABLE = "MEMORY_KATAS_SEED_SHIFT"
# Larger than any seed in the specs, so that no moved seed is another's.
_STRIDE = 1_000_003


def seed(number: int) -> None:
    """Seed torch's own generators, on every device in use.

    For a device that nobody has used, `torch.manual_seed` notes the call and its stack, for ever.
    """
    torch.default_generator.manual_seed(_moved(number))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(_moved(number))


def generator(number: int) -> torch.Generator:
    """A generator of its own on the cpu; torch's are left alone."""
    return torch.Generator().manual_seed(_moved(number))


def _moved(number: int) -> int:
    return number + _STRIDE * int(os.environ.get(SHIFT_VARIABLE, "0"))


def randn(
    *shape: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Normal numbers of this shape; a leaf."""
    drawn = torch.randn(*shape, dtype=dtype, generator=generator)
    return drawn.to(device).requires_grad_(requires_grad)


def rand(
    *shape: int, device: torch.device | str = "cpu", generator: torch.Generator | None = None
) -> Tensor:
    """Numbers of this shape, uniform from 0 to 1."""
    return torch.rand(*shape, generator=generator).to(device)


def randint(
    high: int,
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Integers of this shape, from 0 to high - 1."""
    return torch.randint(high, shape, generator=generator).to(device)


def numbers_after(state: Tensor, device: torch.device | str) -> Tensor:
    """What a generator in this state gives next; no stream moves."""
    generator = torch.Generator(device)
    generator.set_state(state)
    return torch.rand(2, device=device, generator=generator)


def next_random(device: torch.device, count: int = 3) -> Tensor:
    """What the device's own generator gives next: where its random stream is."""
    return torch.rand(count, device=device)
