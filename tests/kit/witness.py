"""An independent witness for the ruler: what the CPU allocator itself reports to the profiler."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def allocator_peak(step: Callable[[], object]) -> int:
    """The most bytes that `step` held on the CPU above what was alive before it.

    The profiler records each allocation and each free in the CPU allocator, those inside an
    operator included. It does not record the free of memory that is older than the step, so a step
    that frees such memory is reported too high. Bytes are not rounded. Raises what the step raises.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = [
        event
        for event in prof.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type().name == "CPU"
    ]
    events.sort(key=lambda event: event.start_ns())
    sizes: list[int] = [event.nbytes() for event in events]
    return max(accumulate(sizes, initial=0))
