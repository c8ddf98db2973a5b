"""What the specs of train_step share: a model far off, and a step read off its weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from kit.laws import draw
from kit.laws.checks import check_close
from kit.laws.precisions import SCALE, scaler_for
from kit.laws.toys import mlp, mse

# Rounding of one 16-bit operation; sums of a few hundred products stay within four of them.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


# What is passed, and a part of the value that the message must hold.
BAD = {
    "dtype": ({"dtype": torch.float64, "scaler": None}, "float64"),
    "no_scaler": ({"dtype": torch.float16, "scaler": None}, ""),
    "stray_scaler": ({"dtype": torch.bfloat16}, ""),
    "max_norm": ({"max_norm": -2.5}, "-2.5"),
    "zero_norm": ({"max_norm": 0.0}, "0"),
    "nan_norm": ({"max_norm": math.nan}, "nan"),
    "triple": ({"batch": (torch.ones(2, 7), torch.ones(2, 5), torch.ones(2))}, ""),
    "empty": ({"batch": (torch.ones(0, 7), torch.ones(0, 5))}, "0"),
    "more_inputs": ({"batch": (torch.ones(6, 7), torch.ones(1, 5))}, "6"),
    "more_targets": ({"batch": (torch.ones(1, 7), torch.ones(6, 5))}, "6"),
}


def regression(device: torch.device) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """A small model and a batch (11 rows) on which it is far off, so that gradients are large."""
    draw.seed(3)
    model = mlp(7, 13, 5, device=device, activation=nn.Tanh)
    return model, (draw.randn(11, 7, device=device), 4 * draw.randn(11, 5, device=device))


def true_gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The gradients of the float32 loss; the model's own are left as they were."""
    names = [name for name, _ in model.named_parameters()]
    loss = mse(model(batch[0]), batch[1])
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def norm_of(tensors: dict[Any, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()]).norm()


def take_step(answer, model, batch, dtype, *, params=None, **options):
    """The result of one step of SGD with lr 1, and by how much each parameter went down."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(params or model.parameters(), lr=1.0)
    scaler = scaler_for(dtype, batch[0].device)
    result = answer.train_step(model, batch, mse, optimizer, scaler, dtype=dtype, **options)
    return result, {name: before[name] - p.detach() for name, p in model.named_parameters()}


def check_norm(got: Tensor | float, want: Tensor, dtype: torch.dtype) -> None:
    """Fail unless `got` is the true norm before clipping; say how many times too long it is."""
    __tracebackhide__ = True
    ratio = float(got) / want.item()
    cause = "it is the norm of clipped, or not of all, gradients"
    if ratio > 2:
        cause = f"it is {ratio:.0f} times the true norm"
    if abs(ratio / SCALE - 1) < 0.1:
        cause += f", and the loss scale is {SCALE:.0f}: the gradients have not been unscaled"
    check_close(got, want, "grad_norm, before clipping", rtol=TOLERANCE[dtype], cause=cause)
