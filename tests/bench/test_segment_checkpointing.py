"""What run_in_segments costs, against torch's checkpoint_sequential at the same segments."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from kit.answers.loading import load
from kit.catalog import find_kata
from kit.laws import draw

LAYERS, SEGMENTS, WIDTH, ROWS, ROUNDS = 16, 4, 256, 512, 40


def _step(run: Callable[[list[nn.Module], Tensor], Tensor]) -> Callable[[], None]:
    """Forward and backward through a chain of its own."""
    draw.seed(0)
    layers: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(LAYERS)
    ]
    x = draw.randn(ROWS, WIDTH, requires_grad=True)
    return lambda: run(layers, x).square().mean().backward()


@pytest.mark.benchmark(group="forward and backward, 16 layers of 256 in 4 segments, 512 rows")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_run_in_segments_against_torchs(benchmark: Any, capsys: Any, reentrant: bool) -> None:
    """Bar: 1.05 x checkpoint_sequential's time.

    The two run in turn, so that a slow moment of the machine hits both: torch's step is timed in
    the set-up of each round of ours, and the figure is the median over the rounds of the ratio.
    """
    ours = load(find_kata("segment_checkpointing").solution)
    step = _step(lambda layers, x: ours.run_in_segments(layers, x, SEGMENTS))
    torchs = _step(
        lambda layers, x: checkpoint_sequential(layers, SEGMENTS, x, use_reentrant=reentrant)
    )
    theirs: list[float] = []

    def timed() -> None:
        start = time.perf_counter()
        torchs()
        theirs.append(time.perf_counter() - start)

    step()
    torchs()  # imports torch._dynamo once
    benchmark.pedantic(step, setup=timed, rounds=ROUNDS)
    ratios = [a / b for a, b in zip(benchmark.stats.stats.data, theirs, strict=True)]
    ratio = statistics.median(ratios)
    with capsys.disabled():
        print(
            f"\nrun_in_segments {1000 * statistics.median(benchmark.stats.stats.data):.1f} ms, "
            f"checkpoint_sequential(use_reentrant={reentrant}) "
            f"{1000 * statistics.median(theirs):.1f} ms, ratio {ratio:.3f} (bar 1.05)"
        )
    assert ratio <= 1.05
