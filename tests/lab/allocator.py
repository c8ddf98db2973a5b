"""What the caching allocator of cuda tells beyond its counters: lines that hold, and segments."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kit.private_torch import DispatchMode, allocation_history
from lab.measure import cuda_budget

HERE = Path(__file__).parent


@contextmanager
def lines_that_hold(device: torch.device) -> Iterator[Callable[[], dict[str, int]]]:
    """Record allocations; yields what gives bytes alive for each line of the lab that made them.

    Elsewhere than on cuda there is none.
    """
    if device.type != "cuda":
        yield dict
        return
    with allocation_history(device) as snapshot:
        yield lambda: _alive_by_line(snapshot())


def _alive_by_line(snapshot: dict[str, Any]) -> dict[str, int]:
    found = Counter[str]()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            # Innermost first; what was allocated before the record began has no frames.
            frames = block.get("frames") or []
            if block["state"] == "active_allocated" and (line := _line(frames)):
                found[line] += block["size"]
    return dict(found.most_common(4))


def _line(frames: list[dict[str, Any]]) -> str:
    for frame in frames:
        path = Path(frame["filename"])
        if HERE in path.parents:
            return f"{path.name}:{frame['line']} {frame['name']}"
    return ""


def reserved_by(
    program: Callable[[torch.device, int], object], device: torch.device, segments: int
) -> dict[str, Any]:
    """Bytes reserved and allocated after each operation of a program within a budget.

    The budget is what is reserved already, `segments` of 20 MiB, and a tenth of these. `failed`:
    whether it ran out of memory; `wanted`: the bytes of its last request.
    """
    gc.collect()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_reserved(device)
    budget = start + int(segments * 20 * 2**20 * 1.1)
    mode, failed = _Counters(device), False
    try:
        with cuda_budget(device, budget), mode:
            program(device, segments)
    except torch.OutOfMemoryError:
        failed = True  # what its traceback holds is freed at the end of this block
    gc.collect()
    torch.cuda.empty_cache()
    return {**mode.counts, "failed": failed, "wanted": segments * 10 * 2**20}


class _Counters(DispatchMode):
    """Reads the allocator's counters before each operation, and after the last."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.counts: dict[str, list[int]] = {"reserved": [], "allocated": []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Before, so that the last reading is what the last request found.
        self.counts["reserved"].append(torch.cuda.memory_reserved(self._device))
        self.counts["allocated"].append(torch.cuda.memory_allocated(self._device))
        return func(*args, **(kwargs or {}))
