"""The references against what a user would pick instead: bytes and time of one step, in one run.

    nox -s bench -- peers

Bars: never more bytes, and never more than 1.05 times the time. The columns are the ratio of the
peaks above what was alive before, and the median of the ratios of the times of rounds in which the
two run in turn, with half of the middle spread: twenty of them, or as many as half a minute has
room for, at least two. A bar that is missed names its reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.pairs import PAIRS, Pair, quiet
from bench.pairs_of_ranks import PAIRS_OF_RANKS
from kit.memory.ruler import human, measure
from lab.measure import alternating, ratio

pytestmark = pytest.mark.timeout(600)
CPU, ROUNDS, LIMIT = torch.device("cpu"), 20, 30.0  # seconds


@pytest.mark.benchmark(group="references against peers")
@pytest.mark.parametrize("pair", [*PAIRS, *PAIRS_OF_RANKS], ids=str)
def test_a_reference_against_a_peer(benchmark: Any, capsys: Any, pair: Pair) -> None:
    with quiet(), pair.within():
        try:
            worlds = {"ours": pair.ours(), "theirs": pair.theirs()}
        except ImportError as error:
            pytest.skip(f"not compared: {error}")
        for step, _ in worlds.values():
            step()  # makes gradients and the optimizer's state
        peaks = {
            name: measure(step, CPU, known=known).above_baseline
            for name, (step, known) in worlds.items()
        }
        steps = {name: step for name, (step, _) in worlds.items()}
        seconds = alternating(steps, CPU, rounds=ROUNDS, limit=LIMIT)
        benchmark.pedantic(steps["ours"], rounds=3)
    times, spread = ratio(seconds["ours"], seconds["theirs"])
    size = peaks["ours"] / peaks["theirs"]
    benchmark.extra_info |= {"peaks": peaks, "bytes": size, "time": times, "spread": spread}
    with capsys.disabled():
        print(
            f"\n{pair.kata} against {pair.peer} ({pair.what}): {size:.3f} of the bytes "
            f"({human(peaks['ours'])}, {human(peaks['theirs'])}), {times:.2f} +- {spread:.2f} of "
            f"the time{f'; {pair.reason}' if pair.reason else ''}"
        )
    assert pair.reason or (size <= 1.0 and times - spread <= 1.05)
