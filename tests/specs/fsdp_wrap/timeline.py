"""One step of a rank as a picture: its shards, and one or two blocks gathered at a time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from kit.laws import draw
from kit.memory.account import Account, account
from kit.ranks.simulated import simulated_world
from kit.ranks.toys import FEATURES, Block, Model
from specs.fsdp_wrap.cases import adamw

TITLE = "One step of rank 0 of 8, 8 blocks 256 wide, 64 samples"


def timeline(answer: ModuleType, reference: ModuleType, device: torch.device) -> dict[str, Account]:
    """The plain way has the whole model on each rank, as in data parallelism."""
    ways = {"plain": None, "reference": reference, "yours": answer}
    return {name: _step(way, device) for name, way in ways.items()}


def _step(answer: Any, device: torch.device) -> Account:
    with simulated_world(8, device) as mesh:
        model = Model(256, blocks=8).to(device)
        wrap = answer.wrap if answer else lambda model, *_: adamw(model.parameters())
        optimizer = wrap(model, mesh, Block, adamw)
        x = draw.randn(64, FEATURES, device=device)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        step()
        return account(step, device, model=model, optimizer=optimizer, known=[x])
