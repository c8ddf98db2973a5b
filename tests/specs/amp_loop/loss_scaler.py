"""What the specs of LossScaler share: gradients as a backward pass leaves them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

GOOD, BAD = 0.75, math.inf


def weights(*sizes: int, device: torch.device) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, device=device)) for size in sizes]


def give_gradients(params: list[nn.Parameter], scale: float, value: float = GOOD) -> None:
    """True gradients of `value`, as a backward pass under `scale` leaves them."""
    for p in params:
        p.grad = torch.full_like(p, value * scale)


def play(scaler, device: torch.device, script: tuple[float, ...]) -> list[tuple[float, Tensor]]:
    """The scale and the weights after each step of a script of true gradients."""
    params = weights(3, 2, device=device)
    optimizer = torch.optim.SGD(params, lr=0.125, momentum=0.5)
    seen = []
    scaler.scale(torch.zeros((), device=device))  # GradScaler makes its scale here
    for value in script:
        give_gradients(params[:1], scaler.get_scale(), value)
        give_gradients(params[1:], scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), torch.cat([p.detach() for p in params]).clone()))
    return seen
