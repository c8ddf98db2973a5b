"""How the lab measures: peaks by kind, the timeline of a step, times, and a budget of bytes."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn
from torch.optim import Optimizer

from kit.answers.loading import load
from kit.catalog import find_kata
from kit.memory.account import Account, account
from kit.memory.ruler import LiveBytes, measure
from kit.private_torch import active_fake_mode
from kit.ranks.simulated import dry_run
from lab import quiet

CPU = torch.device("cpu")
# A step with its model, its optimizer and its data.
Made = tuple[Callable[[], object], nn.Module, Optimizer, Iterable[object]]


@functools.cache
def solution(name: str) -> ModuleType:
    """The reference solution of a kata."""
    return load(find_kata(name).solution)


def books_of(made: Made, device: torch.device) -> Account:
    """The memory of one step by kind; the one before it makes the optimizer's state."""
    step, model, optimizer, known = made
    step()
    return account(step, device, model=model, optimizer=optimizer, known=known)


def rehearsed(make: Callable[[], Made]) -> Account:
    """The same of any size, without memory."""
    with dry_run(1):
        return books_of(make(), CPU)


def books_at_full_size(make: Callable[[], Made], device: torch.device) -> Account:
    """Of a step made on the default device: on cuda as it runs, elsewhere rehearsed."""
    if device.type != "cuda":
        return rehearsed(make)
    with device:
        made = make()
    return books_of(made, device)


def peak_of(step: Callable[[], object], device: torch.device, known: Iterable[object]) -> int:
    """The most bytes that the step adds to what is known; RuntimeError in a dry run."""
    if active_fake_mode():
        raise RuntimeError("fake tensors hold nothing: `rehearsed` counts them")
    return measure(step, device, known=known).above_baseline


def alternating(
    steps: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    limit: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of several steps in turn, so that a busy machine slows all of them alike.

    A first round warms up and does not count. Once two have counted, no round begins after `limit`
    seconds: a processor without 16-bit arithmetic takes ten times as long as one that has it.
    """
    found: dict[str, list[float]] = {name: [] for name in steps}
    with quiet.alone():
        start = time.perf_counter()
        for number in range(rounds + 1):
            if number > 2 and time.perf_counter() - start > limit:
                break
            for name, step in steps.items():
                found[name].append(_seconds(step, device))
    return {name: seconds[1:] for name, seconds in found.items()}


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.cpu.synchronize
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - start


def power(x: Iterable[float], y: Iterable[float]) -> float:
    """The power of x with which y grows: a fit to the logarithms."""
    return statistics.linear_regression([*map(math.log, x)], [*map(math.log, y)]).slope


def ratio(seconds: list[float], to: list[float]) -> tuple[float, float]:
    """How much longer, as the median of the paired ratios, and half their middle spread.

    Two that were timed one after the other may each have stopped at the limit: the shorter counts.
    """
    ratios = sorted(one / other for one, other in zip(seconds, to, strict=False))
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return statistics.median(ratios), (high - low) / 2


class OutOfBudget(MemoryError):
    """On the cpu, what torch.OutOfMemoryError is on cuda: more bytes than the budget has."""


class _Budget(LiveBytes):
    """Counts live bytes, and refuses the operation that would exceed the budget."""

    def __init__(self, budget: int, known: Iterable[object]) -> None:
        super().__init__(known)
        self._budget = budget

    def _made(self, storage: torch.UntypedStorage) -> None:
        super()._made(storage)
        if (alive := self.baseline + self.above) > self._budget:
            raise OutOfBudget(f"{alive} bytes are alive, and the budget is {self._budget}")


@contextmanager
def cuda_budget(device: torch.device, budget: int) -> Iterator[None]:
    """Beyond `budget` bytes of the device the allocator raises torch.OutOfMemoryError."""
    total = torch.cuda.get_device_properties(device).total_memory
    # "cuda" alone names the current device everywhere but here.
    number = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), number)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, number)


def fits(
    step: Callable[[], object], device: torch.device, budget: int, known: Iterable[object] = ()
) -> bool:
    """Whether a step stays within `budget` bytes, what is known included. Out of memory is no.

    On cuda the budget is enforced by the caching allocator, on the cpu by the ruler's count.
    """
    fitted = True
    on_gpu = device.type == "cuda"
    try:
        with cuda_budget(device, budget) if on_gpu else _Budget(budget, known).counting():
            step()
    except (OutOfBudget, torch.OutOfMemoryError):
        fitted = False
    gc.collect()  # not in `except`: its traceback would hold the step's tensors
    return fitted
