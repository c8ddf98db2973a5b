"""Loss scalers that a step may be given, each as a twist, and what only some of them do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from kit.laws.trace import World
from kit.laws.twists import Twist, put


class OnlyItsProtocol:
    """A scaler with the methods that train_step may call, and no more."""

    METHODS = "scale unscale_ step update get_scale state_dict load_state_dict"

    def __init__(self, scaler: Any) -> None:
        for name in self.METHODS.split():
            setattr(self, name, getattr(scaler, name))


class Static(GradScaler):
    """Skips after an overflow, and keeps its scale."""

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(self.get_scale())


def _scaler(make: Callable[[World], Any]) -> Twist:
    """Where there is a scaler, another one."""

    def twist(w: World) -> None:
        if w.scaler:
            w.grad_scaler = make(w)

    return lambda w: w.after.append(twist)


def _shared(w: World) -> Any:
    """The scaler has unscaled the gradients of another optimizer, and one was infinite."""
    other = nn.Parameter(torch.ones(2, device=w.device))
    other.grad = torch.full_like(w.grad_scaler.scale(other), math.inf)
    w.grad_scaler.unscale_(torch.optim.SGD([other], lr=0.1))
    return w.grad_scaler


SCALERS: dict[str, Twist] = {
    "with the protocol's methods alone": _scaler(lambda w: OnlyItsProtocol(w.grad_scaler)),
    "with a scale that stays": _scaler(lambda w: Static(w.device.type, **(w.scaler or {}))),
    "shared with a model that overflows": _scaler(_shared),
    # It is called after an overflow too, and skips by itself.
    "of a fused optimizer": put(sgd={"lr": 0.02, "momentum": 0.9, "fused": True}),
}
