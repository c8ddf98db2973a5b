"""What all parts of amp_loop share: the precisions, a loss, and gradients as a list."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]
