"""The precisions that specs about mixed precision run in, one case each, and their scaler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.amp import GradScaler

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])

# float16 ends at 65,504 and is exact from 6e-5 on: true gradients from 1e-6 to 1,000 fit. The
# default of 65,536 leaves room up to 1.0 only: a harmless problem overflows for one seed in five.
SCALE = 64.0


def scaler_for(dtype: torch.dtype, device: torch.device, **options: float) -> GradScaler | None:
    """A scaler for float16, with SCALE unless told otherwise; None for the other precisions."""
    if dtype != torch.float16:
        return None
    return GradScaler(device.type, **({"init_scale": SCALE} | options))  # type: ignore[arg-type]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new tensors have this dtype, as where a 16-bit model is built."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
