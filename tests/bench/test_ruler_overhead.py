"""What the ruler costs: one training step, plain and under the ruler, side by side in one run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kit.laws import draw
from kit.laws.toys import mlp
from kit.memory.ruler import LiveBytes


@pytest.mark.benchmark(group="a training step of an MLP of 384 x 4, 256 rows")
@pytest.mark.parametrize("ruled", [False, True], ids=["plain", "under_the_ruler"])
def test_step(benchmark: Callable[..., object], ruled: bool) -> None:
    model = mlp(384, 384, 384, 384, 384)
    optimizer = torch.optim.Adam(model.parameters())
    x = draw.randn(256, 384)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def ruled_step() -> None:
        with LiveBytes([model, optimizer, x]).counting():
            step()

    step()
    benchmark.pedantic(ruled_step if ruled else step, rounds=60, warmup_rounds=5)
