"""The branches for cuda, without a GPU: counters of the allocator that begin at 64 MiB.

What the counters count is the live memory of the cpu, so a step can be any code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import pytest
import torch

from kit.answers.loading import load, sources
from kit.catalog import find_kata
from kit.memory import ruler
from kit.memory.ruler import LiveBytes

KIB, MIB = 2**10, 2**20
ALREADY = 64 * MIB  # workspaces, and whatever else lives on the device


class Allocator(LiveBytes):
    """Counts as torch.cuda does: a running figure, and its peak since the last reset."""

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__(existing)
        self._since = 0

    def memory_allocated(self, device: object = None) -> int:
        return ALREADY + self.baseline + self.above

    def max_memory_allocated(self, device: object = None) -> int:
        return ALREADY + self.baseline + max([*self.timeline[self._since :], self.above])

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self._since = len(self.timeline)
        self.timeline.append(self.above)

    @contextmanager
    def installed(self) -> Iterator[None]:
        counters = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
        with (
            mock.patch.multiple(torch.cuda, **{name: getattr(self, name) for name in counters}),
            mock.patch.multiple(
                torch.cuda,
                is_available=lambda: True,
                device_count=lambda: 1,
                synchronize=lambda device=None: None,
            ),
            mock.patch.object(ruler, "_warm_up_cublas"),
            self.counting(),
        ):
            torch.ones(5 * MIB)  # an old peak of 20 MiB, which nobody may report
            yield


@pytest.fixture(params=sources(find_kata("memory_measurement"), "solutions,right"), ids=str)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param.path)


def step() -> torch.Tensor:
    temporary = torch.ones(3 * KIB)
    kept = torch.ones(2 * KIB)
    del temporary
    return kept


def test_peak_memory_reads_the_counters_of_this_step_alone(module: ModuleType) -> None:
    kept: list[torch.Tensor] = []
    with Allocator().installed():
        got = module.peak_memory(lambda: kept.append(step()), "cuda")
        dropped = module.peak_memory(step, torch.device("cuda", 0))
    assert tuple(got) == (ALREADY, ALREADY + 20 * KIB, 8 * KIB)
    assert tuple(dropped) == (ALREADY + 8 * KIB, ALREADY + 28 * KIB, 0)


def test_peak_memory_counts_what_the_step_frees_as_negative(module: ModuleType) -> None:
    held = [torch.ones(KIB)]
    with Allocator(*held).installed():
        got = module.peak_memory(held.clear, "cuda", held)
    assert tuple(got) == (ALREADY + 4 * KIB, ALREADY + 4 * KIB, -4 * KIB)


def test_the_ruler_reads_the_counters_of_this_step_alone() -> None:
    kept: list[torch.Tensor] = []
    with Allocator().installed():
        got = ruler.measure(lambda: kept.append(step()), "cuda")
        kept_no_longer = ruler.measure(kept.clear, "cuda")
    assert (got.baseline, got.above_baseline, got.retained) == (ALREADY, 20 * KIB, 8 * KIB)
    assert got.timeline[0] == ALREADY
    assert max(got.timeline) == got.peak
    assert (kept_no_longer.above_baseline, kept_no_longer.retained) == (0, -8 * KIB)
