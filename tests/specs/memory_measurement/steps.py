"""What the specs have measured: tensors, operations and training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

KIB = 1024


def floats(kib: int, **options: Any) -> Tensor:
    return torch.ones(kib * KIB // 4, **options)


def chain(kib: int, links: int) -> Tensor:
    """The last of some results in a row, each of which is freed when the next is there."""
    y = floats(kib)
    for _ in range(links):
        y = y.neg()
    return y


def training(
    model: nn.Module, make: Callable[..., Optimizer] | None, rows: int
) -> tuple[Callable[[], None], list[Tensor]]:
    """A training step, or evaluation, and what exists before it."""
    x, optimizer = torch.ones(7, rows, 128), make(model.parameters()) if make else None

    def step() -> None:
        with torch.set_grad_enabled(optimizer is not None):
            loss = model(x).square().mean()
        if optimizer:
            loss.backward()
            optimizer.step()

    model(x).square().mean().backward()  # libraries take their workspaces once
    model.zero_grad()
    return step, [x, *model.parameters()]


class Doubled(torch.autograd.Function):
    """Twice its input, which it saves with its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def emptied(saved: Tensor) -> Tensor:
    """A copy of what was saved, which is given back by hand, as FSDP does."""
    copy = saved.clone()
    saved.untyped_storage().resize_(0)
    return copy
