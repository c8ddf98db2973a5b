"""One step of train_step as a picture: activations in 16 bits, and no copies of weights left."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.optim import Adam

from kit.laws import draw
from kit.laws.toys import mlp, mse
from kit.memory.account import Account, account

TITLE = "One training step in bfloat16, 6 layers 128 wide, 2,048 samples"


def timeline(answer: ModuleType, reference: ModuleType, device: torch.device) -> dict[str, Account]:
    """The plain way is the same step in float32, of the reference."""
    bfloat16, float32 = torch.bfloat16, torch.float32
    ways = {"plain": (reference, float32), "reference": (reference, bfloat16)}
    return {
        name: _step(*way, device) for name, way in {**ways, "yours": (answer, bfloat16)}.items()
    }


def _step(answer: Any, dtype: torch.dtype, device: torch.device) -> Account:
    model = mlp(*[128] * 6, 8, device=device)
    batch = tuple(draw.randn(2048, width, device=device) for width in (128, 8))
    optimizer = Adam(model.parameters(), foreach=True)

    def step() -> None:
        answer.train_step(model, batch, mse, optimizer, dtype=dtype)

    step()
    return account(step, device, model=model, optimizer=optimizer, known=batch)
