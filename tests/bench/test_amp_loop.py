"""What LossScaler.unscale_ costs, against torch.amp.GradScaler on the same gradients."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from kit.answers.loading import load
from kit.catalog import find_kata

SIZES, ROUNDS = [4 * 1024 * 1024, *[256 * 1024] * 8, *[512] * 40], 40


@pytest.mark.benchmark(group="unscale_, 6 million gradients in 49 tensors")
def test_unscale_against_torchs(benchmark: Any, capsys: Any) -> None:
    """Bar: 1.1 x GradScaler's time, as the median over the rounds of the ratio.

    The two run in turn, so that a slow moment of the machine hits both.
    """
    ours = load(find_kata("amp_loop").solution)
    params = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(params)

    def timed(make: Any) -> float:
        scaler = make(init_scale=1.0)
        scaler.scale(torch.zeros(()))  # GradScaler makes its scale here
        start = time.perf_counter()
        scaler.unscale_(optimizer)
        return time.perf_counter() - start

    theirs: list[float] = []
    mine: list[float] = []

    def both() -> None:
        theirs.append(timed(lambda **options: GradScaler("cpu", **options)))
        mine.append(timed(ours.LossScaler))

    benchmark.pedantic(both, rounds=ROUNDS, warmup_rounds=3)
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    benchmark.extra_info["ratio"] = ratio
    with capsys.disabled():
        print(f"\nunscale_: {ratio:.2f} x GradScaler's time (bar 1.1)")
