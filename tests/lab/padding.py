"""What padding costs: computed, and timed as a matrix product of so many columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lab.measure import alternating

SIZES = (8, 16, 32, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 160, 192, 224, 255, 256)
WIDE = 256  # a multiple of every tile: nothing is padded


def padded(size: int, multiple: int) -> int:
    """The size in elements that hardware works on which computes in multiples of `multiple`."""
    return -(-size // multiple) * multiple


def seconds_of_products(device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of products of (rows, inner) and (inner, size) for each of SIZES."""
    on_gpu = device.type == "cuda"
    rows, inner, repeats = (16384, 8192, 10) if on_gpu else (1024, 512, 2)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with device:
        left = torch.randn(rows, inner, dtype=dtype)
        rights = {str(size): torch.randn(inner, size, dtype=dtype) for size in SIZES}
    steps: dict[str, Callable[[], object]] = {
        size: partial(_multiply, left, right, repeats) for size, right in rights.items()
    }
    return alternating(steps, device, rounds)


def _multiply(left: Tensor, right: Tensor, repeats: int) -> None:
    for _ in range(repeats):
        left @ right


def waste_of(seconds: dict[str, list[float]]) -> dict[int, float]:
    """Time a column, times that of WIDE; from the fastest of all rounds, the least disturbed."""
    wide = min(seconds[str(WIDE)]) / WIDE
    return {size: min(seconds[str(size)]) / size / wide for size in SIZES}
