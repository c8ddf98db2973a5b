"""One step of a chain in segments as a picture: an input per segment, one segment's activations."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Adam

from kit.laws import draw
from kit.memory.account import Account, account

TITLE = "One step of 36 layers in 6 segments, 64 wide, 2,048 samples"


def timeline(answer: ModuleType, reference: ModuleType, device: torch.device) -> dict[str, Account]:
    """The plain step is the reference with one segment."""
    ways = {"plain": (reference, 1), "reference": (reference, 6), "yours": (answer, 6)}
    return {name: _step(*way, device) for name, way in ways.items()}


def _step(answer: Any, segments: int, device: torch.device) -> Account:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(36))
    layers.to(device)
    x = draw.randn(2048, 64, device=device)
    optimizer = Adam(layers.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        answer.run_in_segments(list(layers), x, segments).square().mean().backward()
        optimizer.step()

    step()
    return account(step, device, model=layers, optimizer=optimizer, known=[x])
