"""One step of LargeModel as a picture: an input for each block, and one block's insides."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.optim import Adam

from kit.laws import draw
from kit.memory.account import Account, account

TITLE = "One step of LargeModel, 16 blocks 128 wide, 8 x 128"


def timeline(answer: ModuleType, reference: ModuleType, device: torch.device) -> dict[str, Account]:
    """The plain way is the reference without checkpoints."""
    ways = {"plain": (reference, False), "reference": (reference, True), "yours": (answer, True)}
    return {name: _step(*way, device) for name, way in ways.items()}


def _step(answer: Any, checkpoint: bool, device: torch.device) -> Account:
    model = answer.LargeModel(16, 128, use_checkpoint=checkpoint).to(device).train()
    x = draw.randn(8, 128, 128, device=device)
    optimizer = Adam(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    return account(step, device, model=model, optimizer=optimizer, known=[x])
